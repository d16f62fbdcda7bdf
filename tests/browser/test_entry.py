"""API key entry, unknown addresses, and a service that does not answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Route, expect

from kith import Kith
from service.server import embedded
from service.settings import load_settings
from tests.browser.chromium import faults
from tests.browser.conftest import KEY, Opener, give_key


def test_a_key_is_asked_for_refused_taken_kept_and_forgotten(visit: Opener, locked: str) -> None:
    with Kith(locked, KEY) as kith:
        few = kith.create_key("door", ["identify"], galleries=["staff"]).token
    page = visit(locked, "/galleries")
    dialog = page.get_by_role("dialog", name="Your key")
    key = dialog.get_by_label("Key", exact=True)
    expect(dialog).to_be_visible()
    expect(dialog.get_by_role("alert")).to_have_count(0)  # no error before the first attempt
    assert faults(page) == []
    key.fill("schlüssel 🔑")  # no header can carry it
    dialog.get_by_role("button", name="Use this key").click()
    expect(key).to_be_focused()
    assert not key.evaluate("(one) => one.checkValidity()")
    key.fill("a-wrong-one")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog.get_by_role("alert")).to_contain_text("does not accept this key")
    assert faults(page) == []
    give_key(page, few)
    expect(page.get_by_role("alert")).to_contain_text("read")  # the scope that it lacks
    assert faults(page) == []
    page.get_by_role("button", name="Your key").click()
    key.fill(f" {KEY} ")
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("link", name="staff")).to_be_visible()
    page.reload()
    expect(page.get_by_role("link", name="staff")).to_be_visible()
    other = page.context.new_page()
    other.goto(f"{locked}/console#/galleries")
    expect(other.get_by_role("dialog", name="Your key")).to_be_visible()  # this tab was not given it
    other.close()
    page.get_by_role("button", name="Your key").click()
    dialog.get_by_role("button", name="Forget the key").click()
    expect(dialog).to_be_visible()
    expect(page.get_by_role("link", name="staff")).to_have_count(0)


def test_a_remembered_key_is_there_in_every_tab_at_once_and_gone_from_all(visit: Opener, locked: str) -> None:
    page = visit(locked, "/galleries")
    other = page.context.new_page()
    other.goto(f"{locked}/console#/galleries")
    other.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    give_key(page, remember=True)
    expect(page.get_by_role("link", name="staff")).to_be_visible()
    expect(other.get_by_role("link", name="staff")).to_be_visible()
    page.get_by_role("button", name="Your key").click()
    page.get_by_role("dialog", name="Your key").get_by_role("button", name="Forget the key").click()
    expect(other.get_by_role("dialog", name="Your key")).to_be_visible()


def test_an_open_service_asks_for_no_key(visit: Opener, own_service: str) -> None:
    """Until its first key, which another tab created, closes it."""
    page = visit(own_service)
    page.get_by_role("button", name="Your key").click()
    dialog = page.get_by_role("dialog", name="Your key")
    expect(dialog).to_contain_text("needs none")
    expect(dialog.get_by_role("textbox")).to_have_count(0)
    dialog.get_by_role("link", name="Manage keys").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("heading", name="No keys yet")).to_be_visible()
    with Kith(own_service) as kith:
        kith.create_key("first", ["admin"])
    page.get_by_role("button", name="Your key").click()
    expect(dialog.get_by_label("Key", exact=True)).to_be_visible()


def test_it_works_where_the_browser_keeps_nothing(visit: Opener, locked: str) -> None:
    page = visit(locked)
    page.add_init_script(
        "for (const name of ['localStorage', 'sessionStorage'])"
        "  Object.defineProperty(window, name, { get() { throw new DOMException('no', 'SecurityError'); } });"
    )
    page.goto(f"{locked}/console#/galleries")
    page.reload()
    give_key(page)
    expect(page.get_by_role("link", name="staff")).to_be_visible()
    page.get_by_role("button", name="Light or dark").click()


def test_an_address_is_a_place_and_one_that_names_no_page_leads_on(visit: Opener, populated: str) -> None:
    page = visit(populated)
    for address in ("/nowhere", "/galleries/%E0%A4", "/galleries/a/b/c/d/e"):
        page.goto(f"{populated}/console#{address}")
        expect(page.get_by_role("heading", name="Page not found")).to_be_visible()
        page.get_by_role("link", name="Go to the start page").click()
        expect(page.get_by_role("heading", level=1, name="Identify")).to_be_visible()
    page.get_by_role("link", name="Galleries").click()
    page.get_by_role("link", name="Health").click()
    expect(page.get_by_role("heading", name="Health", level=1)).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", name="Health", level=1)).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Galleries", level=1)).to_be_visible()


def test_a_service_that_is_gone_is_told_and_found_again(visit: Opener, tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path / "kith", log_level="ERROR")
    with embedded(settings) as url, Kith(url) as kith:
        kith.create_gallery("family")
        page = visit(url)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.get_by_role("link", name="Galleries").click()
    expect(page.get_by_role("alert")).to_contain_text("The service does not answer")
    assert faults(page) == []
    page.get_by_role("button", name="Try again").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The service does not answer")
    expect(page.locator(":focus")).to_have_count(1)


def sign_in(status: int) -> Callable[[Route], None]:
    return lambda route: route.fulfill(status=status, content_type="text/html", body="<h1>Sign in</h1>")


def test_a_page_of_something_between_is_told_as_such(visit: Opener, populated: str) -> None:
    page = visit(populated)
    for status in (200, 502):
        page.route("**/v1/galleries*", sign_in(status))
        page.get_by_role("link", name="Galleries").click()
        told = page.get_by_role("alert")
        expect(told).to_contain_text("answered instead of the service")
        expect(told).to_contain_text("proxy or firewall")
        page.unroute_all()
        told.get_by_role("button", name="Try again").click()
        expect(page.get_by_role("link", name="family", exact=True)).to_be_visible()
        page.get_by_role("link", name="Health").click()


def test_an_error_in_the_corner_goes_but_not_while_somebody_is_at_it(visit: Opener, populated: str) -> None:
    page = visit(populated)
    page.clock.install()
    page.evaluate("import('/console/ui.js').then((ui) => ui.toast('Not so.', 'error'))")
    toast = page.locator(".toast")
    expect(toast).to_be_visible()
    toast.get_by_role("button", name="Dismiss").focus()
    page.clock.run_for(60_000)
    expect(toast).to_be_visible()
    page.get_by_role("link", name="Galleries").focus()
    page.clock.run_for(21_000)
    expect(toast).to_have_count(0)

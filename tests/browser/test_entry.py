"""API keys at the console, unsaved work, unknown addresses, and a service that does not answer."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Page, Route, expect

from kith import Kith
from tests.browser.chromium import faults
from tests.browser.conftest import KEY, Opener, choose, give_key, go, held_back, started

Photos = dict[str, Path]
REFUSED = {"code": "unauthorized", "title": "No key", "detail": "A key is needed.", "remedy": ""}
TOKEN = {"id": "a" * 12, "name": "door", "token": f"kith_{'a' * 12}_secret"}


def test_a_key_is_asked_for_refused_taken_kept_remembered_and_forgotten(visit: Opener, locked: str) -> None:
    page = visit(locked, "/galleries")
    dialog, field = page.get_by_role("dialog", name="Your key"), page.get_by_label("Key", exact=True)
    expect(dialog).to_be_visible()
    expect(dialog.get_by_role("alert")).to_have_count(0)  # no error before the first attempt
    assert faults(page) == []
    field.fill("schlüssel 🔑")  # what no header can carry
    dialog.get_by_role("button", name="Use this key").click()
    expect(field).to_be_focused()
    assert not field.evaluate("(one) => one.checkValidity()")
    field.fill("a-wrong-one")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog.get_by_role("alert")).to_contain_text("does not accept this key")
    with Kith(locked, KEY) as kith:
        few = kith.create_key("door", ["identify"], galleries=["staff"]).token
    give_key(page, few)
    expect(page.get_by_role("alert")).to_contain_text("forbidden")
    assert faults(page) == []

    page.get_by_role("button", name="Your key").click()
    field.fill(f" {KEY} ")
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    page.reload()
    expect(page.get_by_role("link", name="staff")).to_be_visible()
    other = page.context.new_page()
    other.goto(f"{locked}/console#/galleries")
    give_key(other, KEY, remember=True)  # another tab does not know the key, unless it is remembered
    page.get_by_role("button", name="Your key").click()
    dialog.get_by_role("button", name="Forget the key").click()
    expect(page.get_by_role("link", name="staff")).to_have_count(0)
    expect(other.get_by_role("dialog", name="Your key")).to_be_visible()


def test_an_open_service_needs_no_key_until_the_first_whose_tab_goes_on(visit: Opener, tmp_path: Path) -> None:
    with started(tmp_path / "kith") as (service, _):
        page = visit(service)
        page.get_by_role("button", name="Your key").click()
        dialog = page.get_by_role("dialog", name="Your key")
        expect(dialog).to_contain_text("needs none")
        expect(dialog.get_by_role("textbox")).to_have_count(0)
        dialog.get_by_role("link", name="Manage keys").click()
        expect(dialog).to_have_count(0)
        expect(page.get_by_role("heading", name="No keys yet")).to_be_visible()
        page.get_by_role("button", name="Create a key").click()
        page.get_by_label("Owner").fill("operator")
        page.get_by_role("button", name="Create", exact=True).click()
        token = page.get_by_role("textbox", name="Token").input_value()
        assert token.startswith("kith_")
        page.get_by_role("button", name="Done").click()
        expect(page.get_by_role("heading", name="operator (yours)")).to_be_visible()
        with Kith(service, api_key=token) as kith:
            assert [one.name for one in kith.api_keys()] == ["operator"]

        page.get_by_role("button", name="Create a key").click()
        page.get_by_label("Owner").fill("door 3")
        page.get_by_role("button", name="Create", exact=True).click()
        page.get_by_role("button", name="Done").click()
        page.get_by_role("listitem").filter(has_text="door 3").get_by_role("button", name="Revoke", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke", exact=True).click()
        expect(page.get_by_role("heading", name="door 3")).to_have_count(0)
        page.goto(f"{service}/console#/settings/audit")
        revoked = page.get_by_role("row").filter(has_text="Key revoked")
        expect(revoked.get_by_role("cell").nth(2)).to_have_text("operator")


# Unsaved work


def refuse(route: Route) -> None:
    route.fulfill(status=401, json=REFUSED)


def test_a_new_key_leaves_what_is_in_hand(visit: Opener, service: str, kith: Kith, photos: Photos) -> None:
    kith.create_gallery("family")
    page = visit(service, "/enroll?gallery=family")
    choose(page, photos["ada"])
    expect(page.get_by_text("good photo of a face")).to_be_visible()
    page.get_by_label("Name", exact=True).fill("Ada")
    page.route(re.compile("/subjects/ada"), refuse)
    page.get_by_role("button", name="Enroll", exact=True).click()
    give_key(page, "another-one")
    expect(page.get_by_label("Name", exact=True)).to_have_value("Ada")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()

    another_tab(page, "a-third-one")
    expect(page.get_by_label("Name", exact=True)).to_have_value("Ada")
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="Ada is enrolled")).to_be_visible()


def test_what_was_refused_is_asked_for_again_and_the_rest_is_left(visit: Opener, populated: str) -> None:
    page = visit(populated)
    page.route(re.compile("/subjects"), refuse)
    go(page, "/galleries/family")
    dialog = page.get_by_role("dialog", name="Your key")

    def leave() -> None:
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)

    leave()
    page.get_by_role("button", name="Try again").click()
    leave()
    page.get_by_label("Find").fill("lovelace")
    leave()
    page.unroute_all()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/subjects" in request.url else None)
    page.get_by_role("button", name="Your key").click()
    give_key(page, "another-one")
    expect(page.get_by_role("link", name="Ada Lovelace")).to_be_visible()
    expect(page.get_by_label("Find")).to_have_value("lovelace")
    assert len(asked) == 1  # refused several times, but asked once


def another_tab(page: Page, key: str | None) -> None:
    change = "removeItem('kith-key')" if key is None else f"setItem('kith-key', '{key}')"
    page.evaluate(f"localStorage.{change}; dispatchEvent(new StorageEvent('storage', {{ key: 'kith-key' }}))")


def test_two_presses_make_one_key_and_dialogs_go_with_the_key_that_opened_them(visit: Opener, populated: str) -> None:
    page = visit(populated)
    made = held_back(page, "/v1/keys$", "POST")
    go(page, "/settings/keys")
    another_tab(page, "one")
    dialog = page.get_by_role("dialog")
    page.get_by_role("button", name="Create a key").click()
    another_tab(page, None)
    expect(dialog).to_have_count(0)
    another_tab(page, "one")
    page.get_by_role("button", name="Create a key").click()
    dialog.get_by_label("Owner").fill("door")
    another_tab(page, "two")  # a new key keeps unsaved work
    dialog.get_by_role("button", name="Create", exact=True).dblclick()
    expect(dialog.get_by_role("button", name="Create", exact=True)).to_be_disabled()
    page.keyboard.press("Enter")
    assert len(made) == 1
    made[0].fulfill(status=201, json=TOKEN)
    token = page.get_by_role("dialog", name="The token of “door”")
    expect(token).to_be_visible()
    another_tab(page, "three")
    page.go_back()
    expect(token).to_be_visible()
    another_tab(page, None)
    expect(dialog).to_have_count(0)


# Addresses, and a service that does not answer


def test_an_address_that_names_no_page_leads_on(visit: Opener, populated: str) -> None:
    page = visit(populated)
    for address in ("/nowhere", "/galleries/%E0%A4", "/galleries/a/b/c/d/e"):
        go(page, address)
        expect(page.get_by_role("heading", name="Page not found")).to_be_visible()
    page.reload()
    page.get_by_role("link", name="Go to the start page").click()
    expect(page.get_by_role("heading", level=1, name="Identify")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Page not found")).to_be_visible()


def test_a_service_that_is_gone_is_told_and_found_again(visit: Opener, tmp_path: Path) -> None:
    with started(tmp_path / "kith") as (url, _):
        page = visit(url)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.get_by_role("link", name="Galleries").click()
    expect(page.get_by_role("alert")).to_contain_text("The service does not answer")
    assert faults(page) == []
    page.get_by_role("button", name="Try again").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The service does not answer")
    expect(page.locator(":focus")).to_have_count(1)


def test_a_page_of_something_between_is_told_as_such(visit: Opener, populated: str) -> None:
    page, status = visit(populated), 200
    page.route("**/v1/galleries*", lambda route: route.fulfill(status=status, body="<h1>Sign in</h1>"))
    go(page, "/galleries")
    told = page.get_by_role("alert")
    expect(told).to_contain_text("A proxy or firewall answered instead of the service (status 200).")
    status = 502
    told.get_by_role("button", name="Try again").click()
    expect(told).to_contain_text("(status 502)")
    page.unroute_all()
    told.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("link", name="family", exact=True)).to_be_visible()


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

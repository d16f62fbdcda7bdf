"""API keys at the console, below a path prefix too, and unsaved work."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import expect

from kith import Kith
from tests.browser.chromium import faults
from tests.browser.conftest import KEY, Opener, Photos, caught, choose, give_key, go, held_back, name_someone, started
from tests.reverse_proxies import python_proxy

REFUSED = {"code": "unauthorized", "title": "No key", "detail": "A key is needed.", "remedy": ""}


def test_a_key_is_asked_for_kept_and_forgotten(visit: Opener, photos: Photos, tmp_path: Path) -> None:
    """A key that can only enroll overwrites no one, whom it may not see.

    Behind a reverse proxy that serves Kith below a path prefix: nothing goes to the root of the host.
    """
    with started(tmp_path, api_key=KEY) as (upstream, kith), python_proxy(upstream, tmp_path) as url:
        page, outside = visit("", url), list[str]()
        inside = (f"{url}/", "blob:", "data:")
        page.on("request", lambda request: None if request.url.startswith(inside) else outside.append(request.url))
        page.goto(f"{url}/")
        expect(page).to_have_url(f"{url}/console")
        go(page, "/galleries")
        dialog, field = page.get_by_role("dialog", name="Your key"), page.get_by_label("Key", exact=True)
        expect(dialog).to_be_visible()
        expect(dialog.get_by_role("alert")).to_have_count(0)  # no error before the first attempt
        assert faults(page) == []
        field.fill("schlüssel 🔑")  # what no header can carry
        dialog.get_by_role("button", name="Use this key").click()
        expect(field).to_be_focused()
        field.fill("a-wrong-one")
        dialog.get_by_role("button", name="Use this key").click()
        expect(dialog.get_by_role("alert")).to_contain_text("does not accept this key")
        give_key(page, kith.create_key("desk", ["enroll"]).token)
        expect(page.get_by_role("alert")).to_contain_text("forbidden")
        assert faults(page) == []
        kith.create_gallery("desk")
        kith.put_subject("desk", "ada", name="Ada Lovelace", tags=["vip"], metadata={"room": 12})
        go(page, "/enroll")
        page.get_by_label("Gallery").fill("desk")
        page.get_by_label("Gallery").press("Tab")
        choose(page, photos["ada"])
        expect(page.get_by_text("Ready.")).to_be_visible()
        name_someone(page, "Ada")
        expect(page.get_by_role("alert").filter(has_text="There is a subject 'ada'")).to_be_visible()
        ada = kith.subject("desk", "ada")
        assert (ada.name, ada.tags, ada.metadata, ada.template_count) == ("Ada Lovelace", ["vip"], {"room": 12}, 0)
        page.get_by_label("Id", exact=True).fill("ada-king")
        page.get_by_role("button", name="Enroll", exact=True).click()
        expect(page.get_by_role("heading", name="Ada is enrolled")).to_be_visible()
        assert [(one.id, one.name) for one in kith.subjects("desk")] == [("ada", "Ada Lovelace"), ("ada-king", "Ada")]

        page.get_by_role("button", name="Your key").click()
        field.fill(f" {KEY} ")
        page.keyboard.press("Enter")
        expect(dialog).to_have_count(0)
        go(page, "/galleries")
        page.reload()
        expect(page.get_by_role("link", name="desk")).to_be_visible()
        other = page.context.new_page()
        other.goto(f"{url}/console#/galleries")
        give_key(other, KEY, remember=True)  # another tab does not know the key, unless it is remembered
        page.get_by_role("button", name="Your key").click()
        dialog.get_by_role("button", name="Forget the key").click()
        expect(page.get_by_role("link", name="desk")).to_have_count(0)
        expect(other.get_by_role("dialog", name="Your key")).to_be_visible()

        give_key(page)
        go(page, "/galleries/desk/settings")
        with page.expect_download() as exported:
            page.get_by_role("button", name="Export").click()
        assert "ada-king" in exported.value.path().read_text()
        page.get_by_role("link", name="API reference").click()
        expect(page).to_have_url(f"{url}/docs")
        page.locator("#operations-system-getHealth").click()
        page.get_by_role("button", name="Try it out").click()
        with page.expect_response(f"{url}/healthz") as answer:
            page.get_by_role("button", name="Execute").click()
        assert answer.value.ok
        assert outside == []


def test_an_open_service_needs_no_key_until_the_first(visit: Opener, tmp_path: Path) -> None:
    """Two presses make one key. Its token stays on other pages, until the key that opened it goes."""
    with started(tmp_path) as (service, kith):
        kith.create_gallery("family")
        kith.put_subject("family", "tom")
        page = visit("", service)
        page.get_by_role("button", name="Your key").click()
        dialog = page.get_by_role("dialog", name="Your key")
        expect(dialog).to_contain_text("needs none")
        dialog.get_by_role("link", name="Manage keys").click()
        expect(dialog).to_have_count(0)
        expect(page.get_by_role("heading", name="No keys yet")).to_be_visible()
        made, create = held_back(page, "/v1/keys$", "POST"), page.get_by_role("button", name="Create", exact=True)
        for owner in ("operator", "door 3"):
            page.get_by_role("button", name="Create a key").click()
            page.get_by_label("Owner").fill(owner)
            create.dblclick()
            expect(create).to_be_disabled()
            page.keyboard.press("Enter")
            assert len(made) == 1
            made.pop().continue_()
            token = page.get_by_role("dialog", name=f"The token of “{owner}”")
            expect(token.get_by_role("textbox")).to_have_value(re.compile("^kith_"))
            page.mouse.click(5, 5)
            if owner == "operator":
                key = token.get_by_role("textbox").input_value()
                token.get_by_role("button", name="Done").click()
        go(page, "/jobs")
        expect(token).to_be_visible()
        page.evaluate("sessionStorage.clear(); dispatchEvent(new StorageEvent('storage', { key: 'kith-key' }))")
        expect(token).to_have_count(0)
        give_key(page, key)
        go(page, "/settings/keys")
        expect(page.get_by_role("heading", name="operator (yours)")).to_be_visible()
        page.get_by_role("listitem").filter(has_text="door 3").get_by_role("button", name="Revoke", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke", exact=True).click()
        expect(page.get_by_role("heading", name="door 3")).to_have_count(0)

        go(page, "/settings/audit")
        rows = page.get_by_role("table", name="Audit lines").locator("tbody").get_by_role("row")
        revoked = rows.filter(has_text="Key revoked")
        expect(revoked.get_by_role("cell").nth(2)).to_have_text("operator")
        expect(revoked.get_by_role("cell").first).to_contain_text(re.compile(r"\d{4}.*\d:\d\d:\d\d.*[A-Z]"))
        page.get_by_text("Filter", exact=True).click()
        page.get_by_label("What").select_option("gallery_created")
        expect(rows).to_have_text([re.compile("Gallery created in “family”")])
        page.get_by_label("What").select_option("")
        page.get_by_label("In gallery").fill("family")
        page.get_by_label("About the person").fill("tom")
        page.get_by_label("About the person").press("Enter")
        expect(rows).to_have_text([re.compile("Person created or replaced in “family”")])
        page.get_by_label("Until").fill("2020-01-31")
        expect(page.get_by_role("heading", name="No matching lines")).to_be_visible()


def test_a_new_key_leaves_what_is_in_hand(visit: Opener, kith: Kith, photos: Photos) -> None:
    kith.create_gallery("family")
    page = visit("/enroll?gallery=family")
    name = page.get_by_label("Name", exact=True)
    choose(page, photos["ada"])
    expect(page.get_by_text("good photo of a face")).to_be_visible()
    page.route(re.compile("/subjects/ada"), lambda route: route.fulfill(status=401, json=REFUSED))
    name_someone(page, "Ada")
    expect(page.get_by_role("dialog", name="Your key")).to_contain_text("Then repeat what was refused.")
    give_key(page, "another-one")
    expect(name).to_have_value("Ada")

    page.unroute_all()
    slow = held_back(page, "/subjects/ada/templates", "POST")
    page.get_by_role("button", name="Try again").click()
    sent = caught(page, slow)
    page.get_by_role("link", name="Health").click()
    expect(page.get_by_role("heading", name="Health", level=1)).to_be_visible()
    with page.expect_response(lambda answer: answer.request.method == "PATCH"):
        sent.continue_()
    assert kith.subject("family", "ada").name == "Ada"

    go(page, "/galleries/family")
    expect(page.get_by_role("link", name="Ada")).to_be_visible()
    page.route(re.compile("/galleries/family"), lambda route: route.fulfill(status=401, json=REFUSED))
    page.get_by_label("Find").fill("ada")
    expect(page.get_by_text("A key is needed.")).to_be_visible()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    give_key(page, "a-third-one")
    page.unroute_all()
    page.get_by_role("alert").get_by_role("button", name="Try again").click()
    expect(page.get_by_role("link", name="Ada")).to_be_visible()
    page.get_by_role("button", name="Refresh").click()
    expect(page.get_by_text("Not updated since")).to_have_count(0)
    expect(page.get_by_label("Find")).to_have_value("ada")

"""Unsaved work survives a new API key. Dialogs and cameras close with their page. Double clicks act once."""

from __future__ import annotations

import json
import re
from pathlib import Path

from playwright.sync_api import Page, Route, expect

from kith import Kith
from tests.browser.conftest import Opener, choose, give_key

Photos = dict[str, Path]
REFUSED = json.dumps({"code": "unauthorized", "title": "No key", "detail": "A key is needed.", "remedy": ""})
TOKEN = {"id": "a" * 12, "name": "door", "token": f"kith_{'a' * 12}_secret"}


def refuse(route: Route) -> None:
    route.fulfill(status=401, content_type="application/problem+json", body=REFUSED)


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

    page.evaluate("dispatchEvent(new StorageEvent('storage', { key: 'kith-key' }))")  # another tab's
    expect(page.get_by_label("Name", exact=True)).to_have_value("Ada")
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="Ada is enrolled")).to_be_visible()


def test_what_was_refused_is_asked_for_again_and_the_rest_is_left(visit: Opener, populated: str) -> None:
    page = visit(populated)
    page.route(re.compile("/subjects"), refuse)
    page.goto(f"{populated}/console#/galleries/family")
    expect(page.get_by_role("dialog", name="Your key")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("dialog", name="Your key")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_label("Find").fill("lovelace")
    page.unroute_all()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/subjects" in request.url else None)
    page.get_by_role("button", name="Your key").click()
    give_key(page, "another-one")
    expect(page.get_by_role("link", name="Ada Lovelace")).to_be_visible()
    expect(page.get_by_label("Find")).to_have_value("lovelace")
    assert len(asked) == 1  # refused several times, but asked once


def test_a_dialog_and_the_camera_go_with_their_page(visit: Opener, populated: str) -> None:
    page = visit(populated, permissions=["camera"])
    deleted = []
    page.on("request", lambda request: deleted.append(request.url) if request.method == "DELETE" else None)
    page.goto(f"{populated}/console#/galleries")
    page.get_by_role("link", name="family", exact=True).click()
    page.get_by_role("link", name="Tom").click()
    page.get_by_role("button", name="Delete the person").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("link", name="Tom")).to_be_visible()
    assert deleted == []

    page.evaluate(
        """() => {
          const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
          navigator.mediaDevices.getUserMedia = async (wanted) => (window.stream = await ask(wanted));
        }"""
    )
    page.get_by_role("link", name="Compare").click()
    page.get_by_role("button", name="Use the camera").first.click()
    expect(page.get_by_role("button", name="Take the photo")).to_be_enabled()
    page.go_back()
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.wait_for_function("window.stream.getTracks().every((track) => track.readyState === 'ended')")


def another_tab(page: Page, key: str | None) -> None:
    page.evaluate(
        """(key) => {
          if (key === null) localStorage.removeItem("kith-key");
          else localStorage.setItem("kith-key", key);
          dispatchEvent(new StorageEvent("storage", { key: "kith-key" }));
        }""",
        key,
    )


def test_a_dialog_goes_with_the_key_by_which_it_was_opened(visit: Opener, populated: str) -> None:
    page = visit(populated)
    body = json.dumps(TOKEN)
    page.route(
        re.compile("/v1/keys$"),
        lambda route: (
            route.fulfill(status=201, content_type="application/json", body=body)
            if route.request.method == "POST"
            else route.fallback()
        ),
    )
    page.goto(f"{populated}/console#/settings/keys")
    another_tab(page, "one")
    dialog = page.get_by_role("dialog")
    page.get_by_role("button", name="Create a key").click()
    another_tab(page, None)
    expect(dialog).to_have_count(0)
    another_tab(page, "one")
    page.get_by_role("button", name="Create a key").click()
    dialog.get_by_label("Owner").fill("door")
    another_tab(page, "two")  # a new key keeps unsaved work
    dialog.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("dialog", name="The token of “door”")).to_be_visible()
    another_tab(page, "three")
    expect(page.get_by_role("dialog", name="The token of “door”")).to_be_visible()
    another_tab(page, None)
    expect(dialog).to_have_count(0)


def test_two_presses_make_one_key_whose_token_stays(visit: Opener, populated: str) -> None:
    page = visit(populated)
    made = []

    def make(route: Route) -> None:
        if route.request.method != "POST":
            return route.continue_()
        made.append(route)
        return None

    page.route(re.compile("/v1/keys"), make)
    page.goto(f"{populated}/console#/settings/keys")
    page.get_by_role("button", name="Create a key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Owner").fill("door")
    dialog.get_by_role("button", name="Create", exact=True).dblclick()
    expect(dialog.get_by_role("button", name="Create", exact=True)).to_be_disabled()
    page.keyboard.press("Enter")
    assert len(made) == 1
    made[0].fulfill(status=201, content_type="application/json", body=json.dumps(TOKEN))
    token = page.get_by_role("dialog", name="The token of “door”")
    expect(token).to_be_visible()
    page.go_back()
    expect(token).to_be_visible()

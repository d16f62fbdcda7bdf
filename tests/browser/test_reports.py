"""Console pages of reports and settings: risk, jobs, galleries and webhooks."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from playwright.sync_api import expect

from kith import Kith
from tests.browser.chromium import faults
from tests.browser.conftest import PHONE, Opener, Photos, caught, go, held_back, populate


def test_a_risk_is_chosen_used_and_taken_back(visit: Opener, kith: Kith, photos: Photos) -> None:
    populate(kith, "staff", photos, risk={"fpir": 0.001})
    page = visit("/galleries/staff/risk")
    handle = page.get_by_role("slider")
    expect(page.get_by_text("In use", exact=True)).to_be_visible()
    for key, risk in (("Shift", "1,000"), ("ArrowRight", "2,000"), ("End", "100,000"), ("Home", "3"), ("ArrowUp", "5")):
        handle.press(key)
        expect(handle).to_have_attribute("aria-valuetext", re.compile(f"^In 1 of {risk} searches"))

    page.get_by_role("button", name="Use this risk").click()
    undo = page.get_by_role("button", name="Undo")
    expect(undo).to_be_focused()
    assert kith.gallery("staff").risk["fpir"] == 0.2
    undo.click()
    expect(page.get_by_role("status").filter(has_text="staff uses the previous risk")).to_have_count(1)
    assert kith.gallery("staff").risk == {"fpir": 0.001}
    page.get_by_role("link", name="See its changes").click()
    expect(page.get_by_role("table", name="Audit lines").get_by_text("Threshold changed").first).to_be_visible()

    kith.update_gallery("staff", risk={"threshold": 0.01})  # beside the end of the curve
    figures = {"fpir": 0.1, "probe_count": 400, "expected": 40.0, "observed_count": 95}
    page.route("**/staff/risk?*", lambda route: route.fulfill(json=route.fetch().json() | {"check": figures}))
    go(page, "/galleries/staff/risk")
    check = page.get_by_text("Check: Kith searched for each of 400 people")
    expect(check).to_contain_text("about 40 get a wrong name; 95 did. That is far more")
    page.unroute_all()
    expect(page.get_by_text("In use: fixed threshold, similarity 0.010.")).to_be_visible()
    page.get_by_role("button", name="Use this risk").click()
    expect(page.get_by_role("button", name="Undo")).to_be_focused()


def test_many_are_enrolled_from_an_archive(visit: Opener, kith: Kith, photos: Photos, tmp_path: Path) -> None:
    kith.create_gallery("staff")
    archive = tmp_path / "people.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("ada", "tom", "coffee", "party"):
            file.write(photos[name], f"{name}/1.jpg")
    page = visit("/jobs")
    page.get_by_role("button", name="Enroll many people").first.click()
    page.get_by_label("Archive").set_input_files(photos["ada"])
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("dialog").get_by_text("archive_invalid")).to_be_visible()  # told where it was chosen
    page.get_by_label("Archive").set_input_files(archive)
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_text("done, 2 refused")).to_have_class("outcome uncertain")
    expect(page.get_by_text("Enrolled: 2 · No face: 1 · Several faces: 1")).to_be_visible()
    page.get_by_text("Refused items (2)").click()
    expect(page.get_by_text("coffee/1.jpg")).to_be_visible()
    expect(page.get_by_text("The photo shows 6 faces, and none is clearly the largest.")).to_be_visible()

    page.get_by_role("button", name="Retry these with the largest face").click()
    dialog = page.get_by_role("dialog", name="Retry with the largest face")
    expect(dialog).to_contain_text("1 photo with several people")
    assert faults(page) == []
    dialog.get_by_label("Archive").set_input_files(archive)
    dialog.get_by_role("button", name="Start").click()
    expect(page.get_by_text("Already enrolled: 2")).to_be_visible()
    expect(page.get_by_text("done, 1 refused")).to_be_visible()
    assert {one.id for one in kith.subjects("staff")} == {"ada", "tom", "party"}


@pytest.mark.parametrize("width", [1280, 390])
def test_a_message_covers_no_button_and_goes_by_itself(visit: Opener, kith: Kith, width: int) -> None:
    def is_covered(name: str) -> bool:
        message, button = toast.bounding_box(), page.get_by_role("button", name=name).bounding_box()
        assert message and button
        beside = message["x"] + message["width"] <= button["x"] or button["x"] + button["width"] <= message["x"]
        above = message["y"] + message["height"] <= button["y"] or button["y"] + button["height"] <= message["y"]
        return not (beside or above)

    kith.create_gallery("family")
    page = visit("/galleries/family/settings", viewport={"width": width, "height": 800})
    toast = page.locator(".toast")
    page.clock.install()
    page.get_by_role("button", name="Save").click()
    expect(toast).to_be_visible()
    assert not is_covered("Save")
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    assert not is_covered("Delete the gallery")
    page.get_by_role("button", name="Delete the gallery").click()
    assert not is_covered("Cancel")
    page.keyboard.press("Escape")
    toast.get_by_role("button", name="Dismiss").focus()
    page.clock.run_for(60_000)
    expect(toast).to_be_visible()
    page.get_by_role("link", name="Galleries").first.focus()
    page.clock.run_for(7000)
    expect(toast).to_have_count(0)


def test_a_webhook_is_tested_seen_failing_and_deleted(visit: Opener, populated: str) -> None:
    page = visit("", populated)
    hook = {"id": "a" * 12, "name": "Alarm", "url": "https://example.org/hook", "types": ["decision"], "off": False}
    failing = {"failing_since": "2026-01-01T00:00:00Z", "error": "the receiver returned status 404"}
    hooks = [{**hook, "galleries": ["door"], **dict.fromkeys(failing), "waiting_count": 0}]
    page.route("**/v1/webhooks", lambda route: route.fulfill(json={"data": hooks}))
    page.route("**/v1/webhooks/*/test", lambda route: route.fulfill(json={"delivered": True, "error": None}))
    go(page, "/settings/webhooks")
    expect(page.get_by_text("working")).to_be_visible()
    page.get_by_role("button", name="Send a test").click()
    expect(page.get_by_text("accepted the test")).to_be_visible()
    page.wait_for_timeout(2000)  # the list is renewed, and keeps what is focused
    expect(page.get_by_role("button", name="Send a test")).to_be_focused()
    hooks[0] |= {**failing, "waiting_count": 2}
    page.get_by_role("button", name="Refresh").click()
    expect(page.get_by_text("the receiver returned status 404 · 2 events after its position")).to_be_visible()
    page.set_viewport_size(PHONE)
    assert faults(page) == []
    removals = held_back(page, "/v1/webhooks/", "DELETE")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    hooks.clear()
    caught(page, removals).fulfill(status=204)
    expect(page.get_by_text("No webhooks yet")).to_be_visible()

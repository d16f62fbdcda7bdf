"""Console pages of reports and settings: risk, jobs, galleries and webhooks."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from kith import Kith
from tests.browser.chromium import faults, overflow
from tests.browser.conftest import PHONE, Opener, go, populate, started
from tests.receivers import receiving

SEARCHES = re.compile(r"In 1 of ([\d,]+) searches")


def accepted(page: Page) -> int:
    """Return the risk that the slider shows, as one in N."""
    found = SEARCHES.match(page.get_by_role("slider").get_attribute("aria-valuetext") or "")
    assert found is not None
    return int(found[1].replace(",", ""))


def test_a_risk_is_chosen_by_keys_and_by_hand_used_and_taken_back(
    visit: Opener, service: str, kith: Kith, photos: dict[str, Path]
) -> None:
    populate(kith, "staff", photos, risk={"fpir": 0.001})
    page = visit(service, "/galleries/staff/risk")
    handle = page.get_by_role("slider")
    expect(handle).to_be_visible()
    assert accepted(page) == 1000
    expect(page.get_by_text("In use", exact=True)).to_be_visible()

    handle.focus()
    for key, risk in (("ArrowRight", 2000), ("End", 100_000), ("Home", 3)):
        page.keyboard.press(key)
        assert accepted(page) == risk
    box = handle.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    chosen = accepted(page)
    assert 3 < chosen < 1000

    page.get_by_role("button", name="Use this risk").click()
    undo = page.get_by_role("button", name="Undo")
    expect(undo).to_be_focused()
    assert kith.gallery("staff").risk["fpir"] == pytest.approx(1 / chosen, rel=0.01)
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


def test_many_are_enrolled_from_an_archive_and_what_was_refused_is_told(
    visit: Opener, service: str, kith: Kith, photos: dict[str, Path], tmp_path: Path
) -> None:
    kith.create_gallery("staff")
    archive = tmp_path / "people.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("ada", "tom", "coffee", "party"):
            file.write(photos[name], f"{name}/1.jpg")
    page = visit(service, "/jobs")
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


def test_counts_follow_the_galleries(visit: Opener, service: str, kith: Kith, photos: dict[str, Path]) -> None:
    kith.create_gallery("family")
    page = visit(service, "/galleries")
    expect(page.get_by_text("0 people, 0 photos")).to_be_visible()
    populate(kith, "family", photos)
    expect(page.get_by_text("3 people, 3 photos")).to_be_visible()
    for name in ("Ada Lovelace", "The countess", "Tom"):
        expect(page.get_by_role("listitem").get_by_text(name, exact=True)).to_be_visible()
    go(page, "/galleries/family")
    people = page.locator(".stat").filter(has_text="People").locator("dd")
    expect(people).to_have_text("3")
    kith.delete_subject("family", "ada")
    expect(people).to_have_text("2")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_message_covers_no_button_that_one_needs(visit: Opener, service: str, kith: Kith, width: int) -> None:
    def is_covered(name: str) -> bool:
        message, button = page.locator(".toast").bounding_box(), page.get_by_role("button", name=name).bounding_box()
        assert message and button
        beside = message["x"] + message["width"] <= button["x"] or button["x"] + button["width"] <= message["x"]
        above = message["y"] + message["height"] <= button["y"] or button["y"] + button["height"] <= message["y"]
        return not (beside or above)

    kith.create_gallery("family")
    page = visit(service, "/galleries/family/settings", viewport={"width": width, "height": 800})
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".toast")).to_be_visible()
    assert not is_covered("Save")
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    assert not is_covered("Delete the gallery")
    page.get_by_role("button", name="Delete the gallery").click()
    assert not is_covered("Cancel")


def test_a_webhook_is_tested_seen_at_work_and_deleted(visit: Opener, tmp_path: Path) -> None:
    with receiving() as receiver, started(tmp_path, webhook_hosts=receiver.origin) as (url, kith):
        page = visit(url, "/settings/webhooks")
        expect(page.get_by_text("No webhooks yet")).to_be_visible()
        kith.create_gallery("door", risk={"threshold": 0.9})
        kith.create_webhook(f"{receiver.origin}/hook", name="Alarm", types=["decision"], galleries=["door"])
        page.get_by_role("button", name="Refresh").click()
        expect(page.get_by_text("working")).to_be_visible()
        page.get_by_role("button", name="Send a test").click()
        expect(page.get_by_text("accepted the test")).to_be_visible()
        receiver.answers += [404] * 4
        for row in np.eye(2, kith.model().dimension):
            kith.identify("door", embeddings=[row])
        receiver.wait_for(2)
        page.get_by_role("button", name="Refresh").click()
        expect(page.get_by_text("the receiver returned status 404")).to_be_visible()
        expect(page.get_by_text("2 events after its position")).to_be_visible()
        page.set_viewport_size(PHONE)
        assert faults(page) == []
        assert overflow(page) == 0
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.get_by_text("No webhooks yet")).to_be_visible()
        assert list(kith.webhooks()) == []

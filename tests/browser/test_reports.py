"""Console pages of reports and settings: risk, hygiene, jobs, health, keys."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from kith import Kith
from tests.browser.chromium import faults
from tests.browser.conftest import Opener, populate

"""The texts of buttons and fields below a message."""
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
    page.keyboard.press("ArrowRight")
    assert accepted(page) == 2000
    page.keyboard.press("End")
    assert accepted(page) == 100_000
    page.keyboard.press("Home")
    assert accepted(page) == 3
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
    page.go_back()
    expect(page.get_by_text("In use: fixed threshold, similarity 0.010.")).to_be_visible()
    page.get_by_role("button", name="Use this risk").click()
    expect(page.get_by_role("button", name="Undo")).to_be_focused()


def test_the_check_of_the_risk_is_judged_by_its_figures(visit: Opener, populated: str) -> None:
    page = visit(populated)
    figures = {"fpir": 0.1, "probe_count": 400, "expected": 40.0}
    page.route("**/family/risk?*", lambda route: route.fulfill(json=route.fetch().json() | {"check": figures}))
    for observed, said in (
        (95, "far more: there may be duplicates or relatives."),
        (40, "That agrees."),
        (0, "far fewer"),
    ):
        figures["observed_count"] = observed
        page.goto(f"{populated}/console#/galleries/family/risk")
        page.reload()
        check = page.get_by_text("Check: Kith searched for each of 400 people")
        expect(check).to_contain_text(f"about 40 get a wrong name; {observed} did.")
        expect(check).to_contain_text(said)


def test_a_gallery_is_tidied(visit: Opener, service: str, kith: Kith, photos: dict[str, Path]) -> None:
    """One look at many stored pictures is one line of the audit. Someone enrolled twice is made one, or left two."""
    populate(kith, "family", photos, keep_crops=True)
    page = visit(service, "/galleries/family")
    thumbs = page.locator(".people img.thumb")
    expect(thumbs).to_have_count(3)
    page.get_by_label("Find").fill("tom")
    expect(thumbs).to_have_count(1)
    page.get_by_label("Find").fill("")
    expect(thumbs).to_have_count(3)
    (line,) = kith.audit("family", event="crop_read")
    assert (line.details["count"], len(line.details["subjects"])) == (3, 3)

    page.goto(f"{service}/console#/galleries/family/hygiene")
    finding = page.get_by_role("article").filter(has_text="Ada Lovelace and The countess")
    expect(finding.get_by_role("img")).to_have_count(2)
    expect(finding.get_by_text("Odds that both are one person")).to_contain_text("to 1")
    improbable = page.get_by_role("region", name="Nearest pairs").get_by_role("article").first
    expect(improbable.get_by_text("Odds that both are one person")).to_contain_text("1 to ")
    expect(improbable.get_by_role("button", name="Keep")).to_have_count(0)
    improbable.get_by_text("They are one person", exact=True).click()
    expect(improbable.get_by_role("button", name="Keep")).to_have_count(2)
    finding.get_by_role("button", name="Keep Ada Lovelace").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("img")).to_have_count(2)
    assert len(list(kith.audit("family", event="crop_read"))) == 2
    dialog.get_by_role("button", name="Keep Ada Lovelace").click()
    expect(page.get_by_text("The countess was merged into Ada Lovelace.")).to_be_visible()
    assert {one.id: one.template_count for one in kith.subjects("family")} == {"ada": 2, "tom": 1}

    kith.put_subject("family", "countess", name="The countess")
    kith.enroll("family", "countess", photos["ada again"], allow_duplicate=True)
    page.reload()
    finding.get_by_role("button", name="They are two people").click()
    held = "localStorage.getItem('kith-aside-family')"
    known = [*json.loads(page.evaluate(held)), '["lookalikes",["eve","ada"],[]]']
    page.evaluate("(known) => localStorage.setItem('kith-aside-family', known)", json.dumps(known))
    page.reload()
    expect(page.get_by_text("dismissed.")).to_be_visible()
    expect(finding).to_have_count(0)
    kept = page.evaluate(held)
    assert "ada" in kept
    assert "eve" not in kept  # nothing stays of whom hygiene names no more
    kith.update_gallery("family", keep_crops=False)
    page.reload()
    expect(page.get_by_role("link", name="settings", exact=True)).to_be_visible()


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
    expect(page.get_by_text("No face was found in the photo.")).to_be_visible()
    expect(page.get_by_text("The photo shows 6 faces, and none is clearly the largest.")).to_be_visible()
    assert {one.id for one in kith.subjects("staff")} == {"ada", "tom"}

    page.get_by_role("button", name="Retry these with the largest face").click()
    dialog = page.get_by_role("dialog", name="Retry with the largest face")
    expect(dialog).to_contain_text("1 photo with several people")
    assert faults(page) == []
    dialog.get_by_label("Archive").set_input_files(archive)
    dialog.get_by_role("button", name="Start").click()
    expect(page.get_by_text("Already enrolled: 2")).to_be_visible()
    expect(page.get_by_text("done, 1 refused")).to_be_visible()
    assert {one.id for one in kith.subjects("staff")} == {"ada", "tom", "party"}


def test_health_says_what_runs_and_settings_lead_to_the_audit(visit: Opener, populated: str) -> None:
    page = visit(populated, "/health")
    expect(page.get_by_role("heading", name="The service is ready")).to_be_visible()
    expect(page.get_by_text("GPU")).to_have_count(0)
    expect(page.get_by_role("table", name="Queues")).to_contain_text("recognizer/kith-compact")
    expect(page.get_by_role("table", name="Recognizers")).to_contain_text("recognition: ")
    page.get_by_role("link", name="Settings").click()
    page.get_by_role("navigation", name="Settings").get_by_role("link", name="Audit").click()
    expect(page.get_by_role("table", name="Audit lines")).to_be_visible()
    expect(page.get_by_role("banner").get_by_role("link", name="Settings")).to_have_attribute("aria-current", "page")


def test_counts_follow_the_galleries(visit: Opener, service: str, kith: Kith, photos: dict[str, Path]) -> None:
    kith.create_gallery("family")
    page = visit(service, "/galleries")
    expect(page.get_by_text("0 people, 0 photos")).to_be_visible()
    populate(kith, "family", photos)
    expect(page.get_by_text("3 people, 3 photos")).to_be_visible()
    for name in ("Ada Lovelace", "The countess", "Tom"):
        expect(page.get_by_role("listitem").get_by_text(name, exact=True)).to_be_visible()
    page.goto(f"{service}/console#/enroll?gallery=family")
    page.locator("input[type=file]").set_input_files(photos["ada"])
    kith.delete_subject("family", "ada")
    kith.delete_subject("family", "countess")
    page.get_by_label("Name", exact=True).fill("Ada")
    page.get_by_role("button", name="Enroll", exact=True).click()
    expect(page.get_by_label("Gallery")).to_contain_text("family (2 people)")
    page.goto(f"{service}/console#/galleries/family")
    people = page.locator(".stat").filter(has_text="People").locator("dd")
    expect(people).to_have_text("2")
    kith.delete_subject("family", "ada")
    expect(people).to_have_text("1")


def test_the_first_key_closes_the_service_and_the_tab_that_made_it_goes_on(visit: Opener, own_service: str) -> None:
    service = own_service
    page = visit(service, "/settings/keys")
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


def test_the_reference_is_shown_without_a_way_to_the_internet(visit: Opener, populated: str) -> None:
    page = visit(populated)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{populated}/docs")
    page.get_by_text("/v1/galleries/{gallery}/risk", exact=True).click()
    expect(page.get_by_text("FPIR targets; repeatable")).to_be_visible()
    assert [url for url in asked if not url.startswith((populated, "data:"))] == []

"""Console pages of reports and settings: risk, hygiene, jobs, health, keys."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from kith import Kith
from service.server import embedded
from service.settings import load_settings
from tests.browser.chromium import faults
from tests.browser.conftest import Opener, populate
from tests.packs import PROJECTED, projected_pack

COVERED = """() => {
  const box = (element) => element.getBoundingClientRect();
  const over = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const toasts = [...document.querySelectorAll(".toast")].map(box);
  return [...document.querySelectorAll("button, a, input, select, summary")]
    .filter((one) => !one.closest(".toast") && one.checkVisibility() && toasts.some((toast) => over(box(one), toast)))
    .map((one) => one.textContent.trim());
}"""
"""The texts of buttons and fields below a message."""
SEARCHES = re.compile(r"In 1 of ([\d,]+) searches")


@pytest.fixture
def kith(service: str) -> Iterator[Kith]:
    with Kith(service) as client:
        yield client


def held(kith: Kith) -> dict[str, int]:
    return {one.id: one.template_count for one in kith.subjects("family")}


def accepted(page: Page) -> int:
    """Return the risk that the slider shows, as one in N."""
    found = SEARCHES.match(page.get_by_role("slider").get_attribute("aria-valuetext") or "")
    assert found is not None
    return int(found[1].replace(",", ""))


def test_a_risk_is_chosen_by_keys_and_by_hand_used_and_taken_back(
    visit: Opener, service: str, kith: Kith, photos: dict[str, Path]
) -> None:
    kith.create_gallery("staff", risk={"fpir": 0.001})
    populate(kith, "staff", photos)
    page = visit(service)
    page.goto(f"{service}/console#/galleries/staff/risk")
    handle = page.get_by_role("slider")
    expect(handle).to_be_visible()
    assert accepted(page) == 1000
    expect(page.get_by_text("In use", exact=True)).to_be_visible()

    handle.focus()
    page.keyboard.press("ArrowRight")
    assert accepted(page) == 1500
    page.keyboard.press("PageUp")
    page.keyboard.press("Home")
    assert accepted(page) == 3
    page.keyboard.press("End")
    assert accepted(page) == 100_000

    box = handle.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 100, y, steps=5)
    page.mouse.up()
    chosen = accepted(page)
    assert 3 < chosen < 100_000 and chosen != 1000

    page.get_by_role("button", name="Use this risk").click()
    undo = page.get_by_role("button", name="Undo")
    expect(undo).to_be_focused()
    assert kith.gallery("staff").risk["fpir"] == pytest.approx(1 / chosen, rel=0.01)
    undo.click()
    expect(page.get_by_text("staff uses the previous risk")).to_have_count(2)  # in the page, and read aloud
    assert kith.gallery("staff").risk == {"fpir": 0.001}

    page.get_by_text("Details", exact=True).click()
    stops = int(handle.get_attribute("aria-valuemax") or 0)
    page.get_by_label("One in").fill("2500")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(handle).to_be_focused()
    assert accepted(page) == 2500
    assert handle.get_attribute("aria-valuemax") == str(stops + 1)

    kith.update_gallery("staff", risk={"threshold": 0.01})  # not told as the end of the curve, above which it lies
    page.reload()
    expect(page.get_by_text("In use: a larger risk than the curve shows")).to_be_visible()
    page.get_by_role("button", name="Use this risk").click()
    expect(page.get_by_role("button", name="Undo")).to_be_focused()
    expect(page.get_by_text("than the curve shows")).to_have_count(0)


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


def test_a_finger_drags_the_target_on_a_phone(visit: Opener, populated: str) -> None:
    page = visit(populated, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.goto(f"{populated}/console#/galleries/family/risk")
    handle = page.get_by_role("slider")
    handle.scroll_into_view_if_needed()
    box = handle.bounding_box()
    assert box is not None
    assert round(min(box["width"], box["height"]), 3) >= 44  # Chromium computes in 32 bits
    before = accepted(page)
    page.touchscreen.tap(box["x"] + box["width"] / 2 - 60, box["y"] + box["height"] / 2)
    assert accepted(page) < before


def test_someone_enrolled_twice_is_made_one_and_taken_apart_again(
    visit: Opener, service: str, kith: Kith, photos: dict[str, Path]
) -> None:
    kith.create_gallery("family", keep_crops=True)
    populate(kith, "family", photos)
    page = visit(service)
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
    expect(page.get_by_role("dialog")).to_contain_text("with a new creation time")
    expect(page.get_by_role("dialog").get_by_role("img")).to_have_count(2)
    page.get_by_role("dialog").get_by_role("button", name="Keep Ada Lovelace").click()
    undo = page.get_by_role("article").get_by_role("button", name="Undo")
    expect(undo).to_be_visible()
    assert held(kith) == {"ada": 2, "tom": 1}
    undo.click()
    expect(finding.get_by_role("button", name="They are two people")).to_be_visible()
    assert held(kith) == {"ada": 1, "tom": 1, "countess": 1}
    assert kith.subject("family", "countess").name == "The countess"

    finding.get_by_role("button", name="They are two people").click()
    page.reload()
    expect(page.get_by_text("dismissed.")).to_be_visible()
    expect(finding).to_have_count(0)
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
    page = visit(service)
    page.goto(f"{service}/console#/jobs")
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
    expect(
        page.get_by_text("The photo shows 6 faces, and none is clearly the largest. Retry it with the largest face")
    ).to_be_visible()
    assert {one.id for one in kith.subjects("staff")} == {"ada", "tom"}

    page.get_by_role("button", name="Retry these with the largest face").click()
    dialog = page.get_by_role("dialog", name="Retry with the largest face")
    expect(dialog).to_contain_text("1 photo with several people")
    assert faults(page) == []
    dialog.get_by_role("button", name="Start").click()  # this tab still has the archive
    expect(page.get_by_text("Already enrolled: 2")).to_be_visible()
    expect(page.get_by_text("done, 1 refused")).to_be_visible()
    assert {one.id for one in kith.subjects("staff")} == {"ada", "tom", "party"}


def test_health_says_what_runs_and_on_what(visit: Opener, populated: str) -> None:
    page = visit(populated)
    page.goto(f"{populated}/console#/health")
    expect(page.get_by_role("heading", name="The service is ready")).to_be_visible()
    expect(page.get_by_text("GPU")).to_have_count(0)
    row = page.get_by_role("row").filter(has_text="family")
    row.scroll_into_view_if_needed()
    expect(row).to_contain_text("too few matches")


def test_keys_audit_and_recognizers_are_settings(visit: Opener, populated: str) -> None:
    page = visit(populated)
    page.get_by_role("link", name="Settings").click()
    tabs = page.get_by_role("navigation", name="Settings")
    expect(tabs.get_by_role("link", name="API keys")).to_have_attribute("aria-current", "page")
    tabs.get_by_role("link", name="Audit").click()
    expect(page.get_by_role("table", name="Audit lines")).to_be_visible()
    expect(page.get_by_role("banner").get_by_role("link", name="Settings")).to_have_attribute("aria-current", "page")
    tabs.get_by_role("link", name="Recognizers").click()
    expect(page.locator(".network").get_by_text("Recognition", exact=True)).to_be_visible()
    reason = page.locator(".models dd").first
    expect(reason).to_be_hidden()  # hidden until the user opens the details
    page.get_by_text("Details", exact=True).first.click()
    expect(reason).to_be_visible()
    expect(page.locator(".models .network .hint")).to_have_count(0)
    page.get_by_role("row").filter(has_text="family").get_by_role("link", name="Migrate").click()
    expect(page.get_by_role("heading", name="family", level=1)).to_be_visible()
    expect(page.get_by_text("No migration is active")).to_be_visible()


def test_counts_follow_the_galleries(visit: Opener, service: str, kith: Kith, photos: dict[str, Path]) -> None:
    kith.create_gallery("family")
    page = visit(service)
    page.goto(f"{service}/console#/galleries")
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


def test_a_gallery_moves_to_another_recognizer_and_back(visit: Opener, photos: dict[str, Path], tmp_path: Path) -> None:
    other = str(projected_pack(tmp_path).directory)
    with (
        embedded(load_settings(data_dir=tmp_path / "kith", extra_packs=other, log_level="ERROR")) as url,
        Kith(url) as kith,
    ):
        kith.create_gallery("family", keep_crops=True)
        populate(kith, "family", photos)
        page = visit(url)
        page.goto(f"{url}/console#/galleries/family/recognizer")
        page.get_by_role("button", name="Migrate to projected").click()
        expect(page.get_by_text("3 of 3 photos embedded")).to_have_count(2)
        back = page.get_by_role("button", name="Roll back")
        expect(back).to_be_visible()
        assert kith.gallery("family").dimension == PROJECTED
        back.click()
        page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
        expect(page.get_by_text("The migration is stopped")).to_be_visible()
        assert kith.gallery("family").dimension != PROJECTED


def test_the_first_key_closes_the_service_and_the_tab_that_made_it_goes_on(visit: Opener, service: str) -> None:
    page = visit(service)
    page.goto(f"{service}/console#/settings/keys")
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


def test_the_audit_folds_the_thresholds_of_a_gallery(visit: Opener, populated: str) -> None:
    page = visit(populated)

    def line(sequence: int, gallery: str, event: str, actor: str) -> dict[str, object]:
        details = {"before": {"threshold": sequence / 10}, "after": {"threshold": 0.5}, "reason": "enrollment"}
        about = {"outcome": "done", "subject": None, "details": details if event == "threshold_moved" else {}}
        return {"at": f"2026-11-01T10:0{sequence}:00Z", "event": event, "gallery": gallery, "actor": actor, **about}

    moved = "threshold_moved"
    lines = [
        line(4, "family", moved, "service"),
        line(3, "family", "templates_enrolled", "operator"),
        line(2, "empty", moved, "service"),
        line(1, "family", moved, "service"),
    ]
    page.route("**/v1/audit?*", lambda route: route.fulfill(json={"data": lines, "next": None}))
    page.goto(f"{populated}/console#/settings/audit")
    rows = page.get_by_role("table").get_by_role("row")
    expect(rows).to_have_count(1 + 3)
    folded = rows.filter(has_text="Threshold of “family” changed 2 times.")
    expect(folded.get_by_role("cell").nth(2)).to_have_text("Kith itself")
    expect(rows.nth(2).get_by_role("cell").nth(2)).to_have_text("Operator")
    folded.get_by_text("since").click()
    expect(folded.get_by_text("0.1 → 0.5 (enrollment)")).to_be_visible()
    page.get_by_label("What").select_option(moved)
    expect(rows).to_have_count(1 + 4)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_message_covers_no_button_that_one_needs(visit: Opener, service: str, kith: Kith, width: int) -> None:
    kith.create_gallery("family")
    page = visit(service, viewport={"width": width, "height": 800})
    page.goto(f"{service}/console#/galleries/family/settings")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".toast")).to_be_visible()
    covered = page.evaluate(COVERED)
    assert width == 390 or covered == []
    assert "Save" not in covered
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    assert "Delete the gallery" not in page.evaluate(COVERED)
    page.get_by_role("button", name="Delete the gallery").click()
    assert "Cancel" not in page.evaluate(COVERED)


def test_the_reference_is_shown_without_a_way_to_the_internet(visit: Opener, populated: str) -> None:
    page = visit(populated)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{populated}/docs")
    page.get_by_text("/v1/galleries/{gallery}/risk", exact=True).click()
    expect(page.get_by_text("FPIR targets; repeatable")).to_be_visible()
    assert [url for url in asked if not url.startswith((populated, "data:"))] == []

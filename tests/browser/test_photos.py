"""Photos as people have them, and one face of many."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from service.client import Kith
from tests.browser.conftest import Opener

UPRIGHT_IS_TURNED_LEFT = 6
"""EXIF's orientation of a photo whose pixels must be turned to the right to stand upright."""
GIVE = """(place, [photo, kind]) => {
  const bytes = Uint8Array.from(atob(photo), (letter) => letter.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], "given.jpg", { type: "image/jpeg" }));
  const how = { bubbles: true, cancelable: true };
  const event = kind === "drop" ? new DragEvent("drop", { ...how, dataTransfer: given })
    : new ClipboardEvent("paste", { ...how, clipboardData: given });
  place.dispatchEvent(event);
}"""


def cards(page: Page) -> Locator:
    return page.get_by_role("article", name=re.compile("Face"))


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_a_photo_may_be_dropped_anywhere_or_pasted(
    visit: Opener, populated: str, photos: dict[str, Path], kind: str
) -> None:
    page = visit(populated)
    page.goto(f"{populated}/console#/identify?gallery=family")
    page.get_by_text("Drop photos here").wait_for()
    photo = base64.b64encode(photos["tom"].read_bytes()).decode()
    page.get_by_role("heading", level=1).evaluate(GIVE, [photo, kind])
    expect(cards(page).get_by_role("heading")).to_have_text("Tom")


@pytest.mark.parametrize("suffix", ["jpg", "png", "avif", "webp", "tiff"])
def test_boxes_lie_on_the_upright_photo_or_on_a_drawing_of_it(
    visit: Opener, populated: str, photos: dict[str, Path], tmp_path: Path, suffix: str
) -> None:
    with Image.open(photos["tom"]) as photo:
        upright = photo.crop((0, 0, photo.width, photo.height * 9 // 10))
    width, height = upright.size
    lying = upright.rotate(90, expand=True)
    path, exif = tmp_path / f"turned.{suffix}", Image.Exif()
    exif[0x0112] = UPRIGHT_IS_TURNED_LEFT
    lying.save(path, exif=exif)
    page = visit(populated)
    page.goto(f"{populated}/console#/identify?gallery=family")
    page.locator("input[type=file]").set_input_files(path)
    expect(cards(page).get_by_role("heading")).to_have_text("Tom")
    picture = page.locator(".stage-frame").bounding_box()
    assert picture is not None
    assert picture["width"] / picture["height"] == pytest.approx(width / height, rel=0.02)
    told = page.get_by_text("This browser cannot show such a file")
    expect(told).to_have_count(0 if suffix in ("jpg", "png", "avif", "webp") else 1)


def test_a_face_is_shown_where_the_pointer_or_the_focus_is(
    visit: Opener, populated: str, photos: dict[str, Path]
) -> None:
    page = visit(populated)
    page.goto(f"{populated}/console#/identify?gallery=family")
    page.locator("input[type=file]").set_input_files(photos["party"])
    expect(cards(page)).to_have_count(6)
    cards(page).nth(2).hover()
    expect(page.locator(".face-box.pointed")).to_have_count(1)
    expect(page.locator(".face-box").nth(2)).to_have_class(re.compile("pointed"))
    page.get_by_role("button", name=re.compile("^Face 5")).focus()
    page.keyboard.press("Enter")
    expect(cards(page).nth(4)).to_be_focused()


def test_of_several_faces_the_one_that_was_chosen_is_enrolled(
    visit: Opener, service: str, photos: dict[str, Path]
) -> None:
    with Kith(service) as kith:
        kith.create_gallery("friends")
        page = visit(service)
        page.goto(f"{service}/console#/identify?gallery=friends")
        page.locator("input[type=file]").set_input_files(photos["party"])
        cards(page).nth(2).get_by_role("link", name="Enrol this face").click()
        page.get_by_label("Name", exact=True).fill("Third")
        page.get_by_role("button", name="Enrol", exact=True).click()
        page.get_by_text("Third is enrolled").wait_for()
        page.get_by_role("button", name="Enrol somebody else").click()
        page.locator("input[type=file]").set_input_files(photos["party"])
        page.get_by_role("button", name="Choose face 2").click()
        page.get_by_label("Name", exact=True).fill("Second")
        page.get_by_role("button", name="Enrol", exact=True).click()
        page.get_by_text("Second is enrolled").wait_for()
        found = kith.identify("friends", photos["party"]).results
        assert [one.subject for one in found[:3]] == [None, "second", "third"]


def test_a_refusal_says_why_and_going_on_in_spite_of_it_is_a_step_of_its_own(
    visit: Opener, service: str, photos: dict[str, Path]
) -> None:
    with Kith(service) as kith:
        kith.create_gallery("staff")
        kith.put_subject("staff", "ada", name="Ada")
        kith.enrol("staff", "ada", photos["ada"])
        page = visit(service)
        page.goto(f"{service}/console#/enrol?gallery=staff")
        page.locator("input[type=file]").set_input_files(photos["ada again"])
        page.get_by_label("Name", exact=True).fill("Countess")
        page.get_by_role("button", name="Enrol", exact=True).click()
        expect(page.get_by_role("alert").filter(has_text="Already here under another name")).to_contain_text("ada")
        assert [one.id for one in kith.subjects("staff")] == ["ada"]  # who was refused is not made
        page.get_by_role("button", name="They are two people").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        assert [one.id for one in kith.subjects("staff")] == ["ada"]
        page.get_by_role("button", name="It is “ada”").click()
        page.get_by_text("is enrolled").wait_for()
        assert [(one.id, one.name, one.templates) for one in kith.subjects("staff")] == [("ada", "Ada", 2)]


def test_a_search_is_done_anew_where_the_risk_is_another(
    visit: Opener, populated: str, photos: dict[str, Path]
) -> None:
    page = visit(populated)
    page.goto(f"{populated}/console#/identify?gallery=family")
    page.locator("input[type=file]").set_input_files([photos["tom"], photos["party"]])
    with page.expect_request(lambda request: '"strict"' in request.url or "strict" in request.url):
        page.get_by_label("How strict").select_option("strict")
    expect(cards(page).get_by_role("heading")).to_have_text("Tom")
    expect(page.get_by_role("button", name=re.compile("^Photo 2, party.jpg: 6 faces"))).to_be_visible()


def test_two_photos_or_a_photo_and_somebody_enrolled_are_compared(
    visit: Opener, populated: str, photos: dict[str, Path]
) -> None:
    page = visit(populated)
    page.goto(f"{populated}/console#/compare")
    first, second = page.get_by_role("group", name="First"), page.get_by_role("group", name="Second")
    first.locator("input[type=file]").set_input_files(photos["ada"])
    second.locator("input[type=file]").set_input_files(photos["tom"])
    answer = page.get_by_role("region", name="The answer")
    expect(answer.get_by_role("heading")).to_have_text("Different people")
    second.get_by_label("Somebody enrolled").check()
    second.get_by_label("Gallery").select_option("family")
    second.get_by_label("Who").fill("Ada Lovelace (ada)")
    page.keyboard.press("Tab")
    expect(answer.get_by_role("heading")).to_have_text("The same person")

"""Photo formats and orientation, and selecting one of several faces."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from kith import Kith
from tests.browser.chromium import faults
from tests.browser.conftest import PHONE, Opener, Photos, choose, go, name_someone

KEEP_SENT = """() => {
  const ask = fetch;
  globalThis.fetch = (url, options) => {
    if (options.body instanceof File) globalThis.sent = options.body;
    return ask(url, options);
  };
}"""


def cards(page: Page, number: int | str = "") -> Locator:
    return page.get_by_role("article", name=re.compile(f"Face {number}"))


@pytest.mark.parametrize("suffix", ["jpg", "avif", "webp", "tiff", "heic"])
def test_boxes_of_turned_photos(visit: Opener, populated: str, photos: Photos, tmp_path: Path, suffix: str) -> None:
    with Image.open(photos["tom"]) as photo:
        upright = photo.crop((0, 0, photo.width, photo.height * 9 // 10))
    width, height = upright.size
    lying = upright.rotate(90, expand=True)
    path, exif = tmp_path / f"turned.{suffix}", Image.Exif()
    exif[0x0112] = 6  # the orientation of pixels that must be turned to the right to stand upright
    if suffix == "heic":
        heif = pytest.importorskip("pillow_heif", reason="pillow-heif, which writes HEIC, is not installed")
        heif.from_pillow(lying).save(path, exif=exif.tobytes())
    else:
        lying.save(path, exif=exif)
    page = visit("/identify?gallery=family", populated)
    choose(page, path)
    expect(cards(page).get_by_role("heading")).to_have_text("Tom")
    picture = page.locator(".stage-frame").bounding_box()
    assert picture
    assert picture["width"] / picture["height"] == pytest.approx(width / height, rel=0.02)
    told = page.get_by_text("This browser cannot show this format")
    expect(told).to_have_count(0 if suffix in ("jpg", "avif") else 1)


def test_the_first_screen_of_a_phone(visit: Opener, populated: str, photos: Photos, tmp_path: Path) -> None:
    phone = {"viewport": PHONE, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
    page = visit("/identify?gallery=family", populated, **phone)
    choose(page, photos["party"])
    expect(page.get_by_role("heading", name="6 faces")).to_be_visible()
    assert faults(page) == []
    with Image.open(photos["party"]) as party, Image.open(photos["tom"]) as tom:
        guest = tom.resize((tom.width * party.height // tom.height, party.height))
        together = Image.new("RGB", (party.width + guest.width, party.height))
        together.paste(party, (0, 0))
        together.paste(guest, (party.width, 0))
    together.save(tmp_path / "reunion.jpg", quality=95)
    choose(page, tmp_path / "reunion.jpg")
    expect(page.get_by_role("heading", name="7 faces")).to_be_visible()
    bar = page.get_by_role("navigation").first.bounding_box()
    for answer in (page.get_by_role("heading", level=2), page.locator(".face-name").last):
        box = answer.bounding_box()
        assert box and bar and box["y"] + box["height"] < bar["y"]
    expect(cards(page).first.get_by_role("heading")).to_have_text("Tom")
    boxes = [box for box in (one.bounding_box() for one in page.locator(".face-box").all()) if box]
    assert len(boxes) == 7
    for one, following in pairwise(boxes):  # numbered by rows
        assert following["x"] > one["x"] or following["y"] > one["y"] + one["height"] / 2
    lines = page.get_by_role("region", name="Other faces").get_by_role("article")
    expect(lines).to_have_count(6)
    for line in lines.all():
        box = line.bounding_box()
        assert box and box["height"] < 70
    lines.first.locator("summary").first.click()
    expect(lines.first.get_by_text("No person in")).to_be_visible()
    assert faults(page) == []
    page.locator(".options > summary").click()  # the question is still there
    expect(page.get_by_label("How strict")).to_be_visible()
    page.get_by_role("link", name="Galleries").tap()
    expect(page.get_by_role("link", name="family", exact=True)).to_be_visible()


def test_several_photos_and_faces_stay_until_named(visit: Opener, kith: Kith, photos: Photos) -> None:
    kith.create_gallery("friends")
    kith.enroll("friends", "tom", photos["tom"])
    page = visit()
    choose(page, photos["tom"], photos["party"])
    spoken = page.get_by_role("status")
    expect(spoken.filter(has_text="tom.jpg. 1 face: 1 known. tom.")).to_have_count(1)
    with page.expect_request(lambda request: "strict" in request.url):
        page.get_by_label("How strict").select_option("strict")
    expect(cards(page).get_by_role("heading")).to_have_text("tom")
    chip = page.get_by_role("button", name="Photo 2")
    expect(page.get_by_role("button", name="Photo 2, party.jpg: 6 faces")).to_be_visible()
    chip.focus()
    page.keyboard.press("Enter")
    expect(chip).to_have_attribute("aria-current", "true")
    expect(chip).to_be_focused()
    cards(page, 3).hover()
    expect(page.locator(".face-box.pointed")).to_have_count(1)
    expect(page.locator(".face-box").nth(2)).to_have_class(re.compile("pointed"))
    page.get_by_role("button", name=re.compile("^Face 5")).focus()
    page.keyboard.press("Enter")
    expect(cards(page, 5)).to_be_focused()
    cards(page, 3).get_by_role("link", name="Enroll this face").click()
    name_someone(page, "Third")
    page.get_by_role("link", name="Try it: identify").click()
    expect(page.get_by_role("button", name=re.compile("Photo [12]"))).to_have_count(2)
    expect(cards(page, 3).get_by_role("link", name="Third")).to_be_visible()
    expect(spoken.filter(has_text=re.compile(r"^party.jpg. 6 faces: 1 known, .* Third\."))).to_have_count(1)

    go(page, "/enroll?gallery=friends")
    choose(page, photos["party"])
    expect(page.get_by_role("heading", name="6 faces. Which one do you want to enroll?")).to_be_visible()
    expect(page.get_by_role("button", name="Enroll", exact=True)).to_be_disabled()
    assert faults(page) == []
    page.get_by_role("button", name="Choose face 4").click()
    expect(page.get_by_role("button", name="Another face")).to_be_focused()
    page.evaluate(KEEP_SENT)
    name_someone(page, "Fourth")
    page.get_by_text("Fourth is enrolled").wait_for()
    sent = bytes(page.evaluate("sent.arrayBuffer().then((buffer) => Array.from(new Uint8Array(buffer)))"))
    assert len(kith.detect(sent).images[0].faces) == 1, "the others are painted over"
    go(page, "/identify?gallery=friends")
    choose(page, photos["party"])
    expect(cards(page, 4).get_by_role("heading")).to_have_text("Fourth")

"""User stories at the console: first use, unknown faces, mistakes and undoing them."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Error, Locator, Page, Route, expect

from kith import Kith
from tests.browser.chromium import faults, overflow
from tests.browser.conftest import KEY, Opener, choose, give_key, populate, transfer

Photos = dict[str, Path]


def go(page: Page, place: str) -> None:
    page.goto(f"{page.url.split('#')[0]}#{place}")


def first_face(page: Page) -> Locator:
    return page.get_by_role("article", name="Face 1")


def enrolling(visit: Opener, url: str, photo: Path, gallery: str = "family") -> Page:
    """Open the page that enrolls, with a photo."""
    page = visit(url, f"/enroll?gallery={gallery}")
    choose_face(page, photo)
    return page


def choose_face(page: Page, photo: Path) -> None:
    choose(page, photo)
    expect(page.get_by_text("good photo of a face")).to_be_visible()


def name_somebody(page: Page, name: str) -> None:
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_role("button", name="Enroll", exact=True).click()


def test_strangers_get_names(visit: Opener, service: str, kith: Kith, photos: Photos) -> None:
    """Unknown people are listed with their visits, and are named, merged and forgotten."""
    page = visit(service)
    kith.create_gallery("door", keep_crops=True, remember_strangers_days=30)
    kith.identify("door", photos["ada"], faces="largest")
    kith.identify("door", photos["tom"], faces="largest")
    kith.identify("door", photos["party"])
    tom, ada = (one.id for one in list(kith.strangers("door"))[-2:])
    go(page, "/galleries/door")
    expect(page.get_by_role("heading", name="Strangers")).to_be_visible()
    expect(page.get_by_text("kept for 30 days")).to_be_visible()
    line = page.get_by_role("row").filter(has_text=ada[:8])
    line.scroll_into_view_if_needed()
    expect(line.locator("img.thumb")).to_have_count(1)
    assert faults(page) == []
    assert overflow(page) == 0

    page.get_by_role("button", name=f"Name stranger {ada[:8]}").click()
    dialog = page.get_by_role("dialog", name="Name this person")
    assert faults(page) == []
    dialog.get_by_label("Name", exact=True).fill("Ada Lovelace")
    expect(dialog.get_by_label("Id", exact=True)).to_have_value("ada-lovelace")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("link", name="Ada Lovelace")).to_be_visible()
    expect(page.get_by_role("button", name=f"Name stranger {ada[:8]}")).to_have_count(0)
    assert kith.subject("door", "ada-lovelace").name == "Ada Lovelace"

    before = len(list(kith.strangers("door")))
    other = next(iter(kith.strangers("door"))).id
    page.get_by_role("button", name=f"Merge stranger {tom[:8]}").click()
    dialog = page.get_by_role("dialog", name="Merge two strangers")
    dialog.get_by_label("The same person as").select_option(other)
    dialog.get_by_role("button", name="Merge", exact=True).click()
    expect(page.get_by_role("row").filter(has_text=other[:8]).get_by_role("cell").nth(1)).to_have_text("2")
    assert len(list(kith.strangers("door"))) == before - 1

    page.get_by_role("button", name=f"Forget stranger {other[:8]}").click()
    page.get_by_role("dialog").get_by_role("button", name="Forget", exact=True).click()
    expect(page.get_by_role("button", name=f"Forget stranger {other[:8]}")).to_have_count(0)
    page.get_by_role("button", name="Forget all", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Forget all").click()
    expect(page.get_by_text("No strangers yet.")).to_be_visible()
    assert list(kith.strangers("door")) == []


def test_the_first_day(visit: Opener, service: str, kith: Kith, photos: Photos) -> None:
    """Start with an empty service: each page says what to do next, and the first face gets a name."""
    page = visit(service)
    expect(page.get_by_role("heading", name="Create a gallery first")).to_be_visible()
    page.get_by_role("link", name="Create a gallery").click()
    dialog = page.get_by_role("dialog", name="New gallery")
    dialog.get_by_label("Name", exact=True).fill("family")
    expect(dialog.get_by_label("How strict").locator("option:checked")).to_have_text("Standard: one stranger in 1,000")
    expect(dialog.get_by_role("radio", name="Keep no pictures")).to_be_checked()
    expect(dialog.get_by_text("cannot compare them to tell duplicates and wrong names")).to_be_visible()
    dialog.get_by_label("How strict").select_option(label="Strict: one stranger in 10,000")
    assert faults(page) == []
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="family", level=1)).to_be_visible()
    expect(page.get_by_role("heading", name="No people yet")).to_be_visible()

    page.get_by_role("link", name="Enroll a person").click()
    choose_face(page, photos["ada"])
    name_somebody(page, "Ada Lovelace")
    expect(page.get_by_role("heading", name="Ada Lovelace is enrolled")).to_be_visible()
    assert faults(page) == []

    page.get_by_role("link", name="Try it: identify").click()
    choose(page, photos["ada again"])
    expect(first_face(page).get_by_role("link", name="Ada Lovelace")).to_be_visible()
    expect(first_face(page).get_by_text("Known", exact=True)).to_be_visible()
    expect(first_face(page).get_by_text("A stranger is this similar to")).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="1 face: 1 known.")).to_have_count(1)  # for who listens
    page.get_by_text("Details").click()
    expect(first_face(page).get_by_text("False-alarm probability")).to_be_visible()
    assert kith.gallery("family").risk == {"fpir": 0.0001}
    assert [subject.name for subject in kith.subjects("family")] == ["Ada Lovelace"]


def test_a_photo_is_dropped_pasted_and_taken(visit: Opener, service: str, kith: Kith, photos: Photos) -> None:
    populate(kith, "family", {**photos, "ada again": photos["ada"]})
    kith.delete_subject("family", "countess")
    page = visit(service)
    page.get_by_role("button", name="Use the camera").click()
    dialog = page.get_by_role("dialog", name="Look at the camera")
    expect(dialog.get_by_role("status")).to_contain_text("denies this page access")
    dialog.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Use the camera")).to_be_focused()

    page.context.grant_permissions(["camera", "clipboard-read", "clipboard-write"])
    dropped = transfer(page, photos["tom"])
    expect(page.get_by_role("button", name="Use the camera")).to_be_visible()
    page.get_by_role("main").dispatch_event("drop", {"dataTransfer": dropped})
    expect(first_face(page).get_by_role("link", name="Tom")).to_be_visible()

    page.reload()
    expect(page.get_by_role("button", name="Use the camera")).to_be_visible()
    page.evaluate(
        """async (hand) => {
          const picture = await createImageBitmap(hand.files[0]);
          const canvas = new OffscreenCanvas(picture.width, picture.height);
          canvas.getContext("2d").drawImage(picture, 0, 0);
          await navigator.clipboard.write([new ClipboardItem({ "image/png": await canvas.convertToBlob() })]);
        }""",
        transfer(page, photos["tom"]),
    )
    page.keyboard.press("Control+V")
    expect(first_face(page).get_by_role("link", name="Tom")).to_be_visible()

    page.reload()
    page.get_by_role("button", name="Use the camera").click()
    shutter = dialog.get_by_role("button", name="Take the photo")
    expect(shutter).to_be_enabled()
    assert faults(page) == []
    shutter.click()
    expect(first_face(page).get_by_role("link", name="Ada Lovelace")).to_be_visible()


def test_a_wrong_name_is_corrected_and_the_correction_undone(
    visit: Opener, service: str, kith: Kith, photos: Photos
) -> None:
    kith.create_gallery("family", risk={"threshold": -0.9})
    kith.enroll("family", "ada", photos["ada"])
    kith.update_subject("family", "ada", name="Ada Lovelace")
    page = visit(service)
    choose(page, photos["tom"])
    expect(first_face(page).get_by_role("link", name="Ada Lovelace")).to_be_visible()
    first_face(page).get_by_role("button", name="Not Ada Lovelace").click()
    expect(first_face(page).get_by_role("heading", name="Who is it?")).to_be_visible()
    expect(first_face(page)).to_be_focused()
    expect(first_face(page).get_by_role("link", name="A new person")).to_be_visible()
    expect(first_face(page).get_by_text("Noted: this is not Ada Lovelace.")).to_be_visible()
    assert faults(page) == []
    first_face(page).get_by_role("button", name="Undo").click()
    expect(first_face(page).get_by_role("button", name="Not Ada Lovelace")).to_be_visible()

    kith.update_gallery("family", one_face_per_person=False)
    choose(page, photos["party"])  # each face is cut from the photo
    third = page.get_by_role("article", name="Face 3")
    third.get_by_role("button", name="Not Ada Lovelace").click()
    expect(third.get_by_text("Noted: this is not Ada Lovelace.")).to_be_visible()
    expect(third.get_by_role("heading", name="Who is it?")).to_be_visible()
    third.get_by_role("link", name="Somebody enrolled").click()
    expect(page.get_by_label("Enrolled person")).to_be_checked()
    go(page, "/galleries/family/subjects/ada")
    expect(page.get_by_role("heading", name=re.compile("corrected mistake"))).to_be_visible()
    assert faults(page) == []
    remove = page.get_by_role("region", name="Corrected mistakes").get_by_role("button", name="Remove")
    remove.click()
    expect(page.get_by_role("region", name="Corrected mistakes")).to_be_focused()
    assert kith.decoys("family", "ada") == []


def test_a_duplicate_is_refused_and_enrolled_on_insisting_or_as_whom_it_is(
    visit: Opener, service: str, kith: Kith, photos: Photos
) -> None:
    kith.create_gallery("family", keep_crops=True)
    kith.put_subject("family", "ada", name="Ada")
    kith.enroll("family", "ada", photos["ada"])
    page = visit(service, "/enroll?gallery=family")
    choose(page, photos["ada again"])
    name_somebody(page, "The countess")
    expect(page.get_by_role("alert").filter(has_text="The face belongs to another subject")).to_be_visible()
    expect(page.get_by_role("img", name="Stored picture of ada")).to_be_visible()
    assert faults(page) == []
    page.get_by_role("button", name="They are two people").click()
    dialog = page.get_by_role("dialog", name="Are they two different people?")
    expect(dialog.get_by_role("img", name="Stored picture of ada")).to_be_visible()
    dialog.get_by_role("button", name="Cancel").click()
    assert [subject.id for subject in kith.subjects("family")] == ["ada"]
    page.get_by_role("button", name="They are two people").click()
    dialog.get_by_role("button", name="Enroll").click()
    expect(page.get_by_role("heading", name="The countess is enrolled")).to_be_visible()

    with Kith(service) as kith:  # or it is whom it resembles
        kith.delete_subject("family", "the-countess")
        page.reload()
        choose(page, photos["ada again"])
        name_somebody(page, "Zoe New")
        page.get_by_role("button", name="It is “ada”").click()
        expect(page.get_by_role("heading", name="ada is enrolled")).to_be_visible()
        assert [(subject.id, subject.name) for subject in kith.subjects("family")] == [("ada", "Ada")]


def test_two_possible_people_stand_beside_the_face(visit: Opener, service: str, kith: Kith, photos: Photos) -> None:
    for gallery, keeps in (("pictures", True), ("plain", False)):
        kith.create_gallery(gallery, keep_crops=keeps)
        populate(kith, gallery, {**photos, "ada again": photos["ada"]})
    page = visit(service, "/identify?gallery=pictures")
    choose(page, photos["ada"])
    face = first_face(page)
    expect(face.get_by_text("Not sure")).to_be_visible()
    for name in ("Ada Lovelace", "The countess"):
        expect(face.get_by_role("img", name=f"Stored picture of {name}")).to_be_visible()
        expect(face.get_by_role("link", name=f"It is {name}")).to_be_visible()
    assert faults(page) == []
    choose(page, photos["tom"])
    expect(page.get_by_role("img", name="Stored picture of Tom")).to_be_visible()
    page.get_by_role("button", name="Photo 1").click()
    page.get_by_label("Gallery").select_option("plain")
    expect(face.get_by_text("stores no pictures")).to_be_visible()
    face.get_by_role("link", name="settings").click()
    expect(page.get_by_label("Keep a small picture of each enrolled face")).not_to_be_checked()


def test_a_person_is_renamed_moved_and_deleted_with_a_receipt(
    visit: Opener, service: str, kith: Kith, photos: Photos
) -> None:
    populate(kith, "family", photos, keep_crops=True)
    page = visit(service, "/galleries/family")
    expect(page.locator("img.thumb")).to_have_count(3)
    page.get_by_role("link", name="The countess").click()
    page.get_by_label("Name", exact=True).fill("Countess of Lovelace")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="Countess of Lovelace", level=1)).to_be_visible()
    expect(page.get_by_role("img", name="Stored picture of")).to_be_visible()
    page.get_by_role("button", name="Move", exact=True).click()
    dialog = page.get_by_role("dialog", name="Move this photo")
    dialog.get_by_label("Person", exact=True).fill("Ada Lovelace")
    assert faults(page) == []
    dialog.get_by_role("button", name="Move", exact=True).click()
    expect(page.get_by_role("heading", name="No photos yet")).to_be_visible()
    page.get_by_role("button", name="Delete the person").click()
    dialog = page.get_by_role("dialog", name="Delete Countess")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)  # its role is gone before the event "close"
    expect(page.get_by_role("button", name="Delete the person")).to_be_focused()
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("Receipt", exact=True)).to_be_visible()
    assert faults(page) == []
    (receipt,) = kith.erasures("family", "countess")
    expect(page.get_by_text(receipt.id)).to_be_visible()
    assert len(list(kith.templates("family", "ada"))) == 2
    page.get_by_role("link", name="Back to family").click()
    expect(page.get_by_role("link", name="Tom")).to_be_visible()
    expect(page.get_by_role("link", name="The countess")).to_have_count(0)


def test_enroll_and_identify_without_a_mouse(visit: Opener, service: str, kith: Kith, photos: Photos) -> None:
    """Tab, Enter and letters reach everything, with a visible focus."""
    kith.create_gallery("family")
    page = visit(service, "/enroll")
    expect(page.get_by_role("button", name="Choose photos")).to_be_visible()
    with page.expect_file_chooser() as chooser:
        tab_to(page, page.get_by_role("button", name="Choose photos"))
        page.keyboard.press("Enter")
    chooser.value.set_files(photos["ada"])
    expect(page.get_by_text("good photo of a face")).to_be_visible()
    tab_to(page, page.get_by_label("Name", exact=True))
    page.keyboard.type("Ada")
    tab_to(page, page.get_by_role("button", name="Enroll", exact=True))
    page.keyboard.press("Space")
    expect(page.get_by_role("heading", name="Ada is enrolled")).to_be_visible()
    tab_to(page, page.get_by_role("link", name="Try it: identify"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Identify", level=1)).to_be_focused()
    with page.expect_file_chooser() as chooser:
        tab_to(page, page.get_by_role("button", name="Choose photos"))
        page.keyboard.press("Enter")
    chooser.value.set_files(photos["ada"])
    tab_to(page, first_face(page).get_by_role("link", name="Ada"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Ada", level=1)).to_be_visible()


def tab_to(page: Page, wanted: Locator) -> None:
    expect(wanted).to_be_visible()
    for _ in range(60):
        if wanted.evaluate("(one) => one === document.activeElement"):
            return
        page.keyboard.press("Tab")
        ring = page.evaluate(
            "(() => { const at = document.activeElement;"
            " return at === document.body || getComputedStyle(at).outlineStyle !== 'none'; })()"
        )
        assert ring, page.evaluate("document.activeElement.outerHTML")
    pytest.fail(f"sixty tabs do not lead to {wanted}")


def test_on_a_phone(visit: Opener, service: str, kith: Kith, photos: Photos) -> None:
    populate(kith, "family", photos)
    page = visit(service, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, device_scale_factor=2)
    choose(page, photos["party"])
    expect(page.get_by_role("heading", name="6 faces")).to_be_visible()
    boxes = [box for box in (one.bounding_box() for one in page.locator(".face-box").all()) if box]
    assert len(boxes) == 6
    for one, following in pairwise(boxes):  # numbered by rows
        assert following["x"] > one["x"] or following["y"] > one["y"] + one["height"] / 2
    assert overflow(page) == 0
    assert faults(page) == []
    small = [
        f"{control.inner_text()!r}: {box['width']:.0f} x {box['height']:.0f}"
        for control in page.get_by_role("button").all() + page.get_by_role("link").all()
        if (box := control.bounding_box()) and min(box["width"], box["height"]) < 24
    ]
    assert small == []
    page.get_by_role("link", name="Galleries").tap()
    expect(page.get_by_role("link", name="family", exact=True)).to_be_visible()


def test_what_cannot_be_looked_at_is_told_in_words(
    visit: Opener, populated: str, photos: Photos, tmp_path: Path
) -> None:
    (tmp_path / "text.jpg").write_text("This is no photo.")
    (tmp_path / "cut.jpg").write_bytes(photos["ada"].read_bytes()[:9000])
    page = visit(populated)
    for shown, told in (("coffee", "No face found"), ("text", "not supported"), ("cut", "damaged")):
        for place in ("/identify?gallery=family", "/enroll?gallery=family"):
            go(page, place)
            choose(page, photos.get(shown, tmp_path / f"{shown}.jpg"))
            expect(page.get_by_role("main")).to_contain_text(told)
            assert faults(page) == []


def test_a_busy_service_is_waited_for_and_then_told(visit: Opener, populated: str, photos: Photos) -> None:
    page = visit(populated, "/identify?gallery=empty")
    busy = {"code": "overloaded", "title": "The service is overloaded", "detail": "Too many photos.", "remedy": ""}
    headers = {"Retry-After": "1", "Content-Type": "application/problem+json"}
    page.route(re.compile("/identify"), lambda route: route.fulfill(status=503, headers=headers, body=json.dumps(busy)))
    choose(page, photos["ada"])
    expect(page.get_by_text("Next attempt in").first).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("The service is overloaded")
    assert faults(page) == []
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="The gallery is empty")).to_be_visible()


def test_what_a_person_typed_is_never_markup(visit: Opener, service: str, kith: Kith, photos: Photos) -> None:
    name = '<img src=x onerror="document.title=1"> & "Ada"'
    kith.create_gallery("family")
    kith.put_subject("family", "<b>ada", name=name, tags=["<i>"], metadata={"<u>": "</textarea>"})
    kith.enroll("family", "<b>ada", photos["ada"])
    page = visit(service)
    choose(page, photos["ada"])
    first_face(page).get_by_role("link", name=name).click()
    expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()
    page.get_by_role("link", name="family").click()
    expect(page.get_by_role("link", name=name)).to_be_visible()


PRECISE = 12345678901234567890123


def test_only_what_was_edited_is_saved(visit: Opener, service: str, kith: Kith) -> None:
    """Saving keeps the exact digits of untouched values, and what somebody else changed in other fields."""
    kept = {"number": PRECISE, "text": " x ", "one": "1.0"}
    kith.create_gallery("family")
    kith.put_subject("family", "ada", name="Ada", tags=["a,b", "c"], metadata=kept)
    page = visit(service, "/galleries/family/subjects/ada")
    name = page.get_by_label("Name", exact=True)
    name.fill("Ada King")
    kith.update_subject("family", "ada", tags=["other"], metadata={**kept, "more": 1})
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="Ada King", level=1)).to_be_visible()
    ada = kith.subject("family", "ada")
    assert (ada.name, ada.tags, ada.metadata) == ("Ada King", ["other"], {**kept, "more": 1})

    kith.update_subject("family", "ada", tags=["a,b", "c"])
    page.reload()
    fields = page.get_by_label("Fields")
    fields.fill(fields.input_value().replace("more: 1", "more: 2"))
    page.get_by_label("Tags").press("End")
    page.keyboard.type(", d")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    ada = kith.subject("family", "ada")
    assert (ada.tags, ada.metadata) == (["a,b", "c", "d"], {**kept, "more": 2})


def held_back(page: Page, pattern: str) -> list[Route]:
    """Requests that wait until the test releases them."""
    held: list[Route] = []
    page.route(re.compile(pattern), lambda route: held.append(route))
    return held


def until(page: Page, held: list[Route], count: int) -> None:
    for _ in range(200):
        if len(held) >= count:
            return
        page.wait_for_timeout(25)  # processes pending browser messages
    pytest.fail(f"{len(held)} requests of {count}")


def test_a_late_list_of_people_takes_nobody_s_place(visit: Opener, service: str, kith: Kith) -> None:
    for gallery, person in (("first", "Ada"), ("second", "Tom")):
        kith.create_gallery(gallery)
        kith.put_subject(gallery, person.lower(), name=person)
    page = visit(service)
    late = held_back(page, "/galleries/first/subjects")
    go(page, "/enroll?gallery=first")
    page.get_by_label("Enrolled person").check()
    until(page, late, 1)
    answer = late[0].fetch()
    page.get_by_label("Gallery", exact=True).select_option("second")
    expect(page.locator("datalist option")).to_have_count(1)
    with suppress(Error):  # the page that sent the request is gone
        late[0].fulfill(response=answer)
    page.evaluate("() => new Promise((done) => setTimeout(done, 100))")
    expect(page.locator("datalist option")).to_have_attribute("value", "Tom (tom)")


def test_a_late_list_of_a_tag_does_not_mix_with_the_next(visit: Opener, service: str, kith: Kith) -> None:
    kith.create_gallery("family")
    for name, tag in (("Ada", "a"), ("Tom", "b"), ("Zoe", "a,b")):
        kith.put_subject("family", name.lower(), name=name, tags=[tag])
    page = visit(service, "/galleries/family")
    expect(page.get_by_role("link", name="Tom")).to_be_visible()
    late = held_back(page, r"/subjects\?.*tag=a$")
    tagged = page.get_by_label("Tags", exact=True)
    tagged.fill("a")
    tagged.press("Tab")
    until(page, late, 1)
    tagged.fill("b")
    tagged.press("Tab")
    expect(page.get_by_role("link", name="Ada")).to_have_count(0)
    with page.expect_response(re.compile("tag=a$")):
        late[0].continue_()
    page.evaluate("() => new Promise((done) => setTimeout(done, 100))")
    expect(page.get_by_role("link", name="Tom")).to_be_visible()
    expect(page.get_by_role("link", name="Ada")).to_have_count(0)
    tagged.fill("")
    tagged.press("Tab")
    page.get_by_role("link", name="a,b", exact=True).click()
    expect(page.get_by_text("1 person.")).to_be_visible()
    expect(page.get_by_role("link", name="Zoe")).to_be_visible()


def test_who_leaves_at_once_leaves_a_person_with_their_name(
    visit: Opener, service: str, kith: Kith, photos: Photos
) -> None:
    kith.create_gallery("family")
    page = enrolling(visit, service, photos["ada"])
    slow = held_back(page, "/subjects/ada-lovelace/templates")
    name_somebody(page, "Ada Lovelace")
    until(page, slow, 1)
    page.get_by_role("link", name="Health").click()
    expect(page.get_by_role("heading", name="Health", level=1)).to_be_visible()
    with page.expect_response(lambda answer: answer.request.method == "PATCH"):
        slow[0].continue_()
    assert kith.subject("family", "ada-lovelace").name == "Ada Lovelace"


def test_a_refused_photo_goes_to_whom_the_next_one_made(
    visit: Opener, service: str, kith: Kith, photos: Photos
) -> None:
    kith.create_gallery("family")
    page = visit(service, "/enroll?gallery=family")
    poor = {"code": "low_quality", "title": "Poor", "detail": "It is poor.", "remedy": "", "reasons": []}
    page.route(re.compile("/ada/templates"), lambda route: route.fulfill(status=422, json=poor), times=1)
    choose_face(page, photos["ada"])
    name_somebody(page, "Ada")
    anyway = page.get_by_role("button", name="Enroll anyway")
    expect(anyway).to_be_visible()
    choose_face(page, photos["ada again"])
    page.get_by_role("button", name="Enroll", exact=True).click()
    expect(page.get_by_role("heading", name="Ada is enrolled")).to_be_visible()
    anyway.click()
    page.get_by_role("dialog").get_by_role("button", name="Enroll").click()
    expect(page.get_by_text("Enrolled", exact=True)).to_have_count(2)
    assert len(list(kith.templates("family", "ada"))) == 2


def test_what_is_not_saved_of_who_is_enrolled_is_told(visit: Opener, service: str, kith: Kith, photos: Photos) -> None:
    kith.create_gallery("family")
    page = visit(service, "/enroll?gallery=family")
    full = {"code": "storage_unavailable", "title": "No", "detail": "The disk is full.", "remedy": ""}

    def fail(route: Route) -> None:
        if route.request.method == "PATCH":
            route.fulfill(status=503, json=full)
        else:
            route.fallback()

    page.route(re.compile("/subjects/ada$"), fail)
    page.get_by_label("Tags").fill("engine")
    choose_face(page, photos["ada"])
    name_somebody(page, "Ada")
    expect(page.get_by_role("heading", name="Ada is enrolled without the other data")).to_be_visible()
    expect(page.get_by_text("are not saved: The disk is full.")).to_be_visible()
    assert faults(page) == []
    choose(page, photos["ada again"])  # another photo of her, although the id is taken by now
    expect(page.get_by_text("good photo of a face")).to_be_visible()
    page.get_by_role("button", name="Enroll", exact=True).click()
    expect(page.get_by_role("heading", name="ada is enrolled", exact=True)).to_be_visible()
    assert len(list(kith.templates("family", "ada"))) == 2


def test_nobody_who_is_there_is_written_over_by_who_may_not_see_them(
    visit: Opener, locked: str, photos: Photos
) -> None:
    """Enroll with a key of the scope enroll only, and after another client enrolled the same id."""
    with Kith(locked, KEY) as kith:
        kith.create_gallery("desk")
        kith.put_subject("desk", "ada", name="Ada Lovelace", tags=["vip"], metadata={"room": 12})
        page = visit(locked)
        give_key(page, kith.create_key("desk", ["enroll"]).token)
        go(page, "/enroll")
        page.get_by_label("Gallery").fill("desk")
        page.get_by_label("Gallery").press("Tab")
        choose(page, photos["ada"])
        expect(page.get_by_text("Ready.")).to_be_visible()
        name_somebody(page, "Ada")
        expect(page.get_by_role("alert").filter(has_text="The id “ada” is taken")).to_be_visible()
        ada = kith.subject("desk", "ada")
        assert (ada.name, ada.tags, ada.metadata, ada.template_count) == ("Ada Lovelace", ["vip"], {"room": 12}, 0)

        page.get_by_label("Id", exact=True).fill("ada-king")
        page.get_by_role("button", name="Enroll", exact=True).click()
        expect(page.get_by_role("heading", name="Ada is enrolled")).to_be_visible()
        assert kith.subject("desk", "ada-king").name == "Ada"
        assert [subject.id for subject in kith.subjects("desk")] == ["ada", "ada-king"]


def test_who_cannot_be_found_or_named_is_told_why(visit: Opener, service: str, kith: Kith, photos: Photos) -> None:
    kith.create_gallery("family")
    for subject in ("one", "two"):
        kith.put_subject("family", subject, name="Ada")
    page = enrolling(visit, service, photos["ada"])
    enroll = page.get_by_role("button", name="Enroll", exact=True)
    page.get_by_label("Id", exact=True).fill("..")
    enroll.click()
    expect(page.get_by_role("alert").filter(has_text="cannot be “.” or “..”")).to_be_visible()
    page.get_by_label("Enrolled person").check()
    expect(page.locator("datalist option")).to_have_count(2)
    for name, told in (
        ("Ada", "Several people have this name. Enter the id."),
        ("..", "No enrolled person has this name or id."),
    ):
        page.get_by_label("Whose photos are these?").fill(name)
        enroll.click()
        expect(page.get_by_role("alert").filter(has_text=told)).to_be_visible()


def test_settings_are_changed_and_the_gallery_deleted(visit: Opener, service: str, kith: Kith, tmp_path: Path) -> None:
    """A shorter retention asks before it erases; a wrong field is unfolded; who deletes the gallery types its name."""
    kith.create_gallery("old", quality_gate={"min_sharpness": 2.05})
    model, embedding = kith.model(), [1.0, *[0.0] * (kith.model().dimension - 1)]
    header = {"kith": "gallery", "version": 1, "recognizer": model.recognizer, "dimension": model.dimension}
    ada = {"subject": "ada", "created_at": "2020-01-01T00:00:00Z", "embedding": embedding}
    (tmp_path / "old.ndjson").write_text(f"{json.dumps(header)}\n{json.dumps(ada)}\n")
    kith.import_gallery("old", tmp_path / "old.ndjson")
    page = visit(service, "/galleries/old/settings")
    page.get_by_label("Delete photos after").fill("30")
    save, dialog = page.get_by_role("button", name="Save"), page.get_by_role("dialog")
    save.click()
    expect(dialog).to_contain_text("30 days would erase 1 of 1 templates")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    assert kith.gallery("old").retention_days is None
    save.click()
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    assert kith.gallery("old").retention_days == 30
    page.get_by_text("Advanced").click()
    factor = page.get_by_label("Review factor")
    factor.fill("0")
    page.get_by_text("Advanced").click()
    expect(factor).to_be_hidden()
    save.click()
    expect(factor).to_be_focused()

    page.get_by_role("button", name="Delete the gallery").click()
    sure = dialog.get_by_role("button", name="Delete")
    dialog.get_by_label("Type “old” to continue").fill("ol")
    expect(sure).to_be_disabled()
    dialog.get_by_label("Type “old” to continue").fill("old")
    assert faults(page) == []
    sure.click()
    expect(page.get_by_text("“old” is deleted")).to_be_visible()
    assert faults(page) == []
    page.get_by_role("link", name="Back to galleries").click()
    expect(page.get_by_role("heading", name="No gallery yet")).to_be_visible()

"""User stories at the console: first use, unknown faces, mistakes and undoing them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from kith import Kith
from tests.browser.chromium import faults
from tests.browser.conftest import DESK, PHONE, Opener, Photos, choose, go, name_someone, populate, transfer


def first_face(page: Page) -> Locator:
    return page.get_by_role("article", name="Face 1")


def test_the_first_day(visit: Opener, kith: Kith, photos: Photos) -> None:
    """Start with an empty service: each page says what to do next, and the first face gets a name without a mouse."""
    page = visit()
    expect(page.get_by_role("heading", name="Create a gallery first")).to_be_visible()
    page.get_by_role("link", name="Create a gallery").click()
    dialog = page.get_by_role("dialog", name="New gallery")
    dialog.get_by_label("Name", exact=True).fill("family")
    expect(dialog.get_by_role("radio", name="Keep no pictures")).to_be_checked()
    strict = dialog.get_by_label("How strict")
    expect(strict.locator("option:checked")).to_have_text("Relaxed: one stranger in 100")
    assert kith.create_gallery("default").risk == {"fpir": 0.01}
    strict.select_option(label="Strict: one stranger in 10,000")
    assert faults(page) == []
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="No people yet")).to_be_visible()
    page.get_by_role("link", name="Enroll a person").click()
    choose_by_keys(page, photos["ada"])
    expect(page.get_by_text("good photo of a face")).to_be_visible()
    tab_to(page, page.get_by_label("Name", exact=True))
    page.keyboard.type("Ada Lovelace")
    tab_to(page, page.get_by_role("button", name="Enroll", exact=True))
    page.keyboard.press("Space")
    expect(page.get_by_role("heading", name="Ada Lovelace is enrolled")).to_be_visible()
    assert faults(page) == []

    tab_to(page, page.get_by_role("link", name="Try it: identify"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Identify", level=1)).to_be_focused()
    choose_by_keys(page, photos["ada again"])
    expect(first_face(page).get_by_text("A stranger is this similar to")).to_be_visible()
    page.get_by_text("Details").click()
    expect(first_face(page).get_by_text("False-alarm probability")).to_be_visible()
    tab_to(page, first_face(page).get_by_role("link", name="Ada Lovelace").first)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Ada Lovelace", level=1)).to_be_visible()
    assert kith.gallery("family").risk == {"fpir": 0.0001}


def choose_by_keys(page: Page, file: Path) -> None:
    with page.expect_file_chooser() as chooser:
        tab_to(page, page.get_by_role("button", name="Choose photos"))
        page.keyboard.press("Enter")
    chooser.value.set_files(file)


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


def test_strangers_get_names(visit: Opener, kith: Kith, photos: Photos) -> None:
    page = visit()
    kith.create_gallery("door", keep_crops=True, remember_strangers_days=30)
    kith.identify("door", photos["ada"], photos["tom"], faces="largest")
    kith.identify("door", photos["party"])
    tom, ada = (one.id for one in list(kith.strangers("door"))[-2:])
    go(page, "/galleries/door")
    line = page.get_by_role("row").filter(has_text=ada[:8])
    line.scroll_into_view_if_needed()
    expect(line.locator("img.thumb")).to_have_count(1)
    assert faults(page) == []

    page.get_by_role("button", name=f"Name stranger {ada[:8]}").click()
    dialog = page.get_by_role("dialog", name="Name this person")
    assert faults(page) == []
    dialog.get_by_label("Name", exact=True).fill("Ada Lovelace")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("link", name="Ada Lovelace")).to_be_visible()
    expect(page.get_by_role("button", name=f"Name stranger {ada[:8]}")).to_have_count(0)
    expect(page.get_by_role("region", name="Remembered strangers")).to_be_focused()
    assert kith.subject("door", "ada-lovelace").name == "Ada Lovelace"

    other = next(iter(kith.strangers("door"))).id
    page.get_by_role("button", name=f"Merge stranger {tom[:8]}").click()
    dialog = page.get_by_role("dialog", name="Merge two strangers")
    dialog.get_by_label("The same person as").select_option(other)
    dialog.get_by_role("button", name="Merge", exact=True).click()
    expect(page.get_by_role("row").filter(has_text=other[:8]).get_by_role("cell").nth(2)).to_have_text("2")
    expect(page.get_by_role("button", name=f"Merge stranger {tom[:8]}")).to_have_count(0)

    page.get_by_role("button", name=f"Forget stranger {other[:8]}").click()
    page.locator("dialog:modal").get_by_role("button", name="Forget", exact=True).click()
    expect(page.get_by_role("button", name=f"Forget stranger {other[:8]}")).to_have_count(0)
    page.set_viewport_size(PHONE)
    box = page.get_by_role("button", name="Forget stranger").first.bounding_box()
    assert box and box["height"] < 50  # one line; the table scrolls
    page.set_viewport_size(DESK)
    page.get_by_role("button", name="Forget all", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Forget all").click()
    expect(page.get_by_text("No strangers yet.")).to_be_visible()
    expect(page.get_by_role("button", name="Forget all")).to_have_count(0)


def test_a_photo_is_dropped_pasted_and_taken(visit: Opener, kith: Kith, photos: Photos) -> None:
    populate(kith, "family", photos)
    kith.delete_subject("family", "countess")
    page = visit(permissions=["camera"])
    expect(page.get_by_role("button", name="Use the camera")).to_be_visible()
    page.get_by_role("main").dispatch_event("drop", {"dataTransfer": transfer(page, photos["tom"])})
    expect(first_face(page).get_by_role("link", name="Tom")).to_be_visible()
    page.evaluate(
        """(clipboardData) => {
          (window.paste = () =>
            document.body.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true })))();
          const devices = navigator.mediaDevices, ask = devices.getUserMedia.bind(devices);
          devices.getUserMedia = async (wanted) => (window.stream = await ask(wanted));
        }""",
        transfer(page, photos["ada"]),
    )
    expect(first_face(page).get_by_role("link", name="Ada Lovelace")).to_be_visible()

    page.get_by_role("link", name="Compare").click()
    page.get_by_role("button", name="Use the camera").first.click()
    shutter = page.get_by_role("dialog", name="Look at the camera").get_by_role("button", name="Take the photo")
    expect(shutter).to_be_enabled()
    page.go_back()  # the camera stops with its page
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.wait_for_function("window.stream.getTracks().every((track) => track.readyState === 'ended')")
    page.get_by_role("button", name="Use the camera").click()
    expect(shutter).to_be_enabled()
    assert faults(page) == []
    page.evaluate("paste()")  # not into a dialog
    shutter.click()
    expect(page.get_by_role("status").filter(has_text="camera.jpg. 1 face: 1 known. Ada Lovelace.")).to_have_count(1)
    expect(page.get_by_role("button", name="Photo 2")).to_have_count(0)

    page = visit()
    page.get_by_role("button", name="Use the camera").click()
    expect(page.get_by_role("dialog").get_by_role("status")).to_contain_text("denies this page a camera")


def test_a_wrong_name_is_corrected_and_the_correction_undone(visit: Opener, kith: Kith, photos: Photos) -> None:
    kith.create_gallery("family", risk={"threshold": -0.9})
    kith.put_subject("family", "ada", name="Ada Lovelace")
    kith.enroll("family", "ada", photos["ada"])
    page = visit()
    choose(page, photos["tom"])
    expect(first_face(page).get_by_role("link", name="Ada Lovelace")).to_be_visible()
    first_face(page).get_by_role("button", name="Not Ada Lovelace").click()
    expect(first_face(page).get_by_role("heading", name="Who is it?")).to_be_visible()
    expect(first_face(page)).to_be_focused()
    expect(first_face(page).get_by_text("Noted: this is not Ada Lovelace.")).to_be_visible()
    assert faults(page) == []
    first_face(page).get_by_role("button", name="Undo").click()
    expect(first_face(page).get_by_role("button", name="Not Ada Lovelace")).to_be_visible()

    kith.update_gallery("family", one_face_per_person=False)
    choose(page, photos["party"])  # each face is cut from the photo
    third = page.get_by_role("article", name="Face 3")
    third.get_by_role("button", name="Not Ada Lovelace").click()
    third.get_by_role("link", name="Someone enrolled").click()
    expect(page.get_by_label("Enrolled person")).to_be_checked()
    go(page, "/galleries/family/subjects/ada")
    mistakes = page.get_by_role("region", name="Corrected mistakes")
    expect(mistakes.get_by_role("heading")).to_have_text("1 corrected mistake")
    assert faults(page) == []
    mistakes.get_by_role("button", name="Remove").click()
    expect(mistakes).to_be_focused()
    assert kith.decoys("family", "ada") == []


def test_a_double_is_refused_insisted_on_noticed_and_merged(visit: Opener, kith: Kith, photos: Photos) -> None:
    """Stored pictures help to tell who is who. One look at many of them is one line of the audit."""
    kith.create_gallery("family", keep_crops=True)
    for subject in ("ada", "tom"):
        kith.put_subject("family", subject, name=subject.capitalize())
        kith.enroll("family", subject, photos[subject])
    page = visit("/galleries/family")
    for name, count in (("", 2), ("tom", 1), ("", 2)):
        page.get_by_label("Find").fill(name)
        expect(page.locator(".people img.thumb")).to_have_count(count)
    (line,) = kith.audit("family", event="crop_read")
    assert (line.details["count"], len(line.details["subjects"])) == (2, 2)

    go(page, "/enroll?gallery=family")
    choose(page, photos["ada again"])
    name_someone(page, "Zoe New")
    page.get_by_role("button", name="It is “ada”").click()
    expect(page.get_by_role("heading", name="ada is enrolled")).to_be_visible()
    page.get_by_role("button", name="Enroll another person").click()
    choose(page, photos["ada again"])
    name_someone(page, "Countess")
    expect(page.get_by_role("alert").filter(has_text="The face belongs to another subject")).to_be_visible()
    expect(page.get_by_role("img", name="Stored picture of ada")).to_be_visible()
    assert faults(page) == []
    page.get_by_role("button", name="They are two people").click()
    dialog = page.get_by_role("dialog", name="Are they two different people?")
    expect(dialog.get_by_role("img", name="Stored picture of ada")).to_be_visible()
    dialog.get_by_role("button", name="Cancel").click()
    assert [(subject.id, subject.name) for subject in kith.subjects("family")] == [("ada", "Ada"), ("tom", "Tom")]
    page.get_by_role("button", name="They are two people").click()
    dialog.get_by_role("button", name="Enroll").click()
    expect(page.get_by_role("heading", name="Countess is enrolled")).to_be_visible()

    page = visit("/identify?gallery=family")  # the file field of the page before would take the photo
    choose(page, photos["ada"])
    face = first_face(page)
    expect(face.get_by_text("Not sure")).to_be_visible()
    for name in ("Ada", "Countess"):
        expect(face.get_by_role("img", name=f"Stored picture of {name}")).to_be_visible()
        expect(face.get_by_role("link", name=f"It is {name}")).to_be_visible()
    assert faults(page) == []

    stale = json.dumps(['["lookalikes",["eve","ada"],[]]'])  # nothing stays of whom no finding names
    page.evaluate("(stale) => localStorage.setItem('kith-aside-family', stale)", stale)
    go(page, "/galleries/family/hygiene")
    finding = page.get_by_role("article").filter(has_text="Ada and Countess")
    expect(finding.get_by_role("img")).to_have_count(2)
    expect(finding.get_by_text("Odds that both are one person")).to_contain_text("to 1")
    improbable = page.get_by_role("region", name="Nearest pairs").get_by_role("article").first
    expect(improbable.get_by_role("button", name="Keep")).to_have_count(0)
    improbable.get_by_text("They are one person", exact=True).click()
    expect(improbable.get_by_role("button", name="Keep")).to_have_count(2)
    finding.get_by_role("button", name="They are two people").click()
    page.get_by_role("button", name="Undo").click()
    page.reload()
    finding.get_by_role("button", name="They are two people").click()
    page.reload()
    expect(page.get_by_text("dismissed.")).to_be_visible()
    expect(finding).to_have_count(0)
    assert "eve" not in page.evaluate("localStorage.getItem('kith-aside-family')")
    page.get_by_role("button", name="Show dismissed findings").click()
    finding.get_by_role("button", name="Keep Ada").click()
    expect(page.get_by_role("dialog").get_by_role("img")).to_have_count(2)
    page.get_by_role("dialog").get_by_role("button", name="Keep Ada").click()
    expect(page.get_by_text("Countess was merged into Ada.")).to_be_visible()
    assert {one.id: one.template_count for one in kith.subjects("family")} == {"ada": 3, "tom": 1}
    kith.update_gallery("family", keep_crops=False)
    go(page, "/galleries/family/subjects/ada")
    page.get_by_role("link", name="settings", exact=True).click()
    expect(page.get_by_label("Keep a small picture of each enrolled face")).not_to_be_checked()


def test_a_person_is_edited_moved_and_deleted_with_a_receipt(visit: Opener, kith: Kith, photos: Photos) -> None:
    """What is typed is never markup. Saving keeps what was not edited, and what another client changed meanwhile."""
    page = visit("/galleries")
    populate(kith, "family", photos, keep_crops=True)
    expect(page.get_by_text("3 people, 3 photos")).to_be_visible()
    for name in ("Ada Lovelace", "The countess", "Tom"):
        expect(page.get_by_role("listitem").get_by_text(name, exact=True)).to_be_visible()
    kept = {"number": 12345678901234567890123, "text": " x ", "one": "1.0", "<u>": "</textarea>"}
    kith.put_subject("family", "countess", name="The countess", tags=["a,b", "<i>"], metadata=kept)
    go(page, "/galleries/family")
    people = page.locator(".stat").filter(has_text="People").locator("dd")
    expect(people).to_have_text("3")
    kith.delete_subject("family", "tom")
    expect(people).to_have_text("2")
    page.get_by_role("link", name="The countess").click()
    marked = '<img src=x onerror="document.title=1"> & "Ada"'
    page.get_by_label("Name", exact=True).fill(marked)
    kith.update_subject("family", "countess", tags=["other"], metadata={**kept, "more": 1})
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name=marked, level=1)).to_be_visible()
    countess = kith.subject("family", "countess")
    assert (countess.name, countess.tags, countess.metadata) == (marked, ["other"], {**kept, "more": 1})
    kith.update_subject("family", "countess", tags=["a,b", "c"])
    page.reload()
    fields = page.get_by_label("Fields")
    fields.fill(fields.input_value().replace("more: 1", "more: 2"))
    page.get_by_label("Tags").press("End")
    page.keyboard.type(", d")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    countess = kith.subject("family", "countess")
    assert (countess.tags, countess.metadata) == (["a,b", "c", "d"], {**kept, "more": 2})

    page.get_by_role("button", name="Move", exact=True).click()
    dialog = page.get_by_role("dialog", name="Move this photo")
    for name in ("countess", "Ada Lovelace"):
        dialog.get_by_label("Person", exact=True).fill(name)
        assert faults(page) == []
        dialog.get_by_role("button", name="Move", exact=True).click()
        expect(page.get_by_text("The photo already belongs")).to_have_count(int(name == "countess"))
    expect(page.get_by_role("heading", name="No photos yet")).to_be_visible()
    page.get_by_role("button", name="Delete the person").click()
    page.get_by_role("dialog", name="Delete <img").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("link", name="Back to family")).to_be_focused()
    assert faults(page) == []
    (receipt,) = kith.erasures("family", "countess")
    expect(page.get_by_text(receipt.id)).to_be_visible()
    assert len(list(kith.templates("family", "ada"))) == 2


def test_unusable_photos_and_a_busy_service(visit: Opener, populated: str, photos: Photos, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("This is no photo.")
    page = visit("", populated)
    for place in ("/enroll?gallery=empty", "/identify?gallery=empty"):
        go(page, place)
        for shown, told in (("coffee", "No face found"), ("text", "not supported")):
            choose(page, photos.get(shown, tmp_path / f"{shown}.jpg"))
            expect(page.get_by_role("main")).to_contain_text(told)
        assert faults(page) == []
    busy = {"code": "overloaded", "title": "The service is overloaded", "detail": "Too many photos.", "remedy": ""}
    page.route(
        re.compile("/identify"), lambda route: route.fulfill(status=503, headers={"Retry-After": "1"}, json=busy)
    )
    choose(page, photos["ada"])
    expect(page.get_by_text("Next attempt in 1 s").first).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("The service is overloaded")
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="The gallery is empty")).to_be_visible()


def test_enrolling_meets_refusals(visit: Opener, kith: Kith, photos: Photos) -> None:
    kith.create_gallery("family")
    for subject in ("one", "two"):
        kith.put_subject("family", subject, name="Zoe")
    page = visit("/enroll?gallery=family")
    choose(page, photos["ada"], photos["tom"])
    enroll, remove = (page.get_by_role("button", name=name, exact=True) for name in ("Enroll", "Remove"))
    expect(page.get_by_text("good photo of a face")).to_have_count(2)
    remove.first.focus()
    for left in (remove, page.get_by_role("button", name="Choose photos")):  # the focus is at the next one
        page.keyboard.press("Enter")
        expect(left).to_be_focused()
    choose(page, photos["ada"])
    expect(page.get_by_text("good photo of a face")).to_be_visible()
    page.evaluate("scrollTo(0, 0)")
    expect(enroll).to_be_in_viewport(ratio=1)  # above the fold
    page.get_by_label("Id", exact=True).fill("..")
    enroll.click()
    expect(page.get_by_role("alert").filter(has_text="cannot be empty, “.” or “..”")).to_be_visible()
    page.get_by_label("Enrolled person").check()
    expect(page.locator("datalist option")).to_have_count(2)
    for name, told in (("Zoe", "Several people have this name."), ("..", "No enrolled person has this name or id.")):
        page.get_by_label("Whose photos are these?").fill(name)
        enroll.click()
        expect(page.get_by_role("alert").filter(has_text=told)).to_be_visible()
    page.get_by_label("New person").check()
    page.get_by_label("Id", exact=True).fill("ada")

    # A refused photo goes to the person whom the next one made, of whom not everything is saved.
    poor = {"code": "low_quality", "title": "Poor", "detail": "It is poor.", "remedy": "", "reasons": []}
    page.route(re.compile("/ada/templates"), lambda route: route.fulfill(status=422, json=poor), times=1)
    full = {"code": "storage_unavailable", "title": "No", "detail": "The disk is full.", "remedy": ""}
    page.route(re.compile("/subjects/ada$"), lambda route: route.fulfill(status=503, json=full))
    page.get_by_label("Tags").fill("engine")
    name_someone(page, "Ada Lovelace")  # the name does not replace a typed id
    anyway = page.get_by_role("button", name="Enroll anyway")
    expect(anyway).to_be_visible()
    choose(page, photos["ada again"])
    expect(page.get_by_text("good photo of a face")).to_be_visible()
    enroll.click()
    expect(page.get_by_text("are not saved: The disk is full.")).to_be_visible()
    assert faults(page) == []
    anyway.click()
    page.get_by_role("dialog").get_by_role("button", name="Enroll").click()
    expect(page.get_by_text("Enrolled", exact=True)).to_have_count(2)
    assert len(list(kith.templates("family", "ada"))) == 2


def test_settings_are_changed_and_the_gallery_deleted(visit: Opener, kith: Kith, tmp_path: Path) -> None:
    """A shorter retention asks before it erases; a wrong field is unfolded; who deletes the gallery types its name."""
    kith.create_gallery("old", quality_gate={"min_sharpness": 2.05})
    model, embedding = kith.model(), [1.0, *[0.0] * (kith.model().dimension - 1)]
    header = {"kith": "gallery", "version": 1, "recognizer": model.recognizer, "dimension": model.dimension}
    ada = {"subject": "ada", "created_at": "2020-01-01T00:00:00Z", "embedding": embedding}
    (tmp_path / "old.ndjson").write_text(f"{json.dumps(header)}\n{json.dumps(ada)}\n")
    kith.import_gallery("old", tmp_path / "old.ndjson")
    page = visit("/galleries/old/settings")
    page.evaluate("localStorage.setItem('kith-aside-old', '[]')")
    page.get_by_label("Delete photos after").fill("30")
    page.get_by_label("How strict").select_option("own")
    page.get_by_label("One stranger in").fill("5000")
    save, dialog = page.get_by_role("button", name="Save"), page.get_by_role("dialog")
    for answer in ("Cancel", "Delete"):
        assert kith.gallery("old").retention_days is None
        save.click()
        expect(dialog).to_contain_text("30 days would erase 1 of 1 templates")
        dialog.get_by_role("button", name=answer).click()
        expect(dialog).to_have_count(0)
    expect(page.get_by_text("Saved.")).to_be_visible()
    assert (kith.gallery("old").retention_days, kith.gallery("old").risk) == (30, {"fpir": 0.0002})
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
    page.get_by_role("link", name="Back to galleries").click()
    assert page.evaluate("localStorage.getItem('kith-aside-old')") is None
    expect(page.get_by_role("heading", name="No gallery yet")).to_be_visible()

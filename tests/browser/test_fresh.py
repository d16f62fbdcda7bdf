"""Albums, and pages that stay open: they refresh, or show that their content is outdated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from kith import Kith
from service.usecases import albums as usecase
from tests.browser.chromium import faults
from tests.browser.conftest import PHONE, Opener, Photos, caught, go, held_back, started, transfer

REFUSAL = {"code": "no_face", "title": "No face", "detail": "None was found.", "remedy": ""}
ID, TIME = "1" * 32, "2026-01-01T00:00:00Z"


def answers(page: Page, pattern: str, answer: dict[str, Any], status: int = 200) -> None:
    """Answer requests as the service does in states that take long to reach."""
    page.route(re.compile(pattern), lambda route: route.fulfill(status=status, json=answer))


def job(**state: Any) -> dict[str, Any]:
    about = {"id": ID, "kind": "enrollment", "gallery": "family", "updated_at": TIME}
    rate = {"total_count": 100, "rate": 1, "remaining_s": 9, "canceling": False, "counts": {}, "problem": None}
    return {**about, **rate, "state": "running", "done_count": 3, "failed_count": 0, **state}


def test_jobs_list_their_refused_items_and_say_since_when_they_are_stale(visit: Opener, populated: str) -> None:
    page = visit("", populated)
    page.clock.install()
    answers(page, r"/v1/jobs\?", {"data": [job(failed_count=60)], "next": None})
    items = [{"item": f"photo {i}", "problem": REFUSAL} for i in range(60)]
    answers(page, "/items", {"data": items[:50], "next": "50"})
    answers(page, "/items.*cursor=", {"data": items[50:], "next": None})
    page.goto(f"{populated}/console#/jobs")
    page.locator("details.items summary").click()
    expect(page.locator(".refusals li")).to_have_count(50)
    page.get_by_role("button", name="Show more").click()
    expect(page.locator(".refusals li")).to_have_count(60)
    expect(page.get_by_role("button", name="Show more")).to_have_count(0)

    page.unroute_all()
    answers(page, r"/v1/jobs\?", {"code": "forbidden", "detail": "this needs the scope 'read'"}, 403)
    page.clock.run_for(2000)
    note = page.get_by_role("status").filter(has_text="Not updated since")
    expect(note).to_contain_text("This needs the scope 'read'.")
    expect(page.locator(".job")).to_have_count(1)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(60_000)
    assert asked == []  # the audit has each refused request
    page.unroute_all()
    answers(page, r"/v1/jobs\?", {"data": [job(done_count=50)], "next": None})
    note.get_by_role("button", name="Refresh").click()
    expect(page.get_by_text("50 of 100 items")).to_be_visible()
    expect(note).to_have_count(0)


def test_an_album_shows_its_progress_and_stays_deleted(visit: Opener, populated: str) -> None:
    page = visit("", populated)
    answers(page, "/v1/jobs/", job())
    album = {"id": ID, "state": "grouping", "photo_count": 60, "face_count": 9, "expires_at": TIME}
    answers(page, "/albums/", album)
    go(page, f"/galleries/family/albums/{ID}")
    expect(page.get_by_text("3 of 100 items")).to_be_visible()
    assert faults(page) == []
    looks, removals = held_back(page, "/albums/", "GET"), held_back(page, "/albums/", "DELETE")
    late = caught(page, looks)
    page.get_by_role("button", name="Delete the album").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    caught(page, removals).fulfill(json={"receipt": {"id": ID, "at": TIME, "removed": {}}})
    gone = page.get_by_role("heading", name="The album is deleted.")
    expect(gone).to_be_visible()
    late.fulfill(status=404, json=REFUSAL)
    page.wait_for_timeout(500)
    expect(gone).to_be_visible()
    assert len(looks) == 1


def test_photos_become_people(
    visit: Opener, kith: Kith, photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [photos[name] for name in ("ada", "ada again", "tom", "tom again", "coffee")]
    files.append(tmp_path / f"{'a long name ' * 12}.jpg")
    files[-1].write_bytes(photos["party"].read_bytes())
    kith.create_gallery("family")
    page = visit("/galleries/family/albums")
    page.get_by_role("button", name="New album").last.focus()
    page.wait_for_timeout(2000)  # the list is renewed, and its button keeps the focus
    page.keyboard.press("Enter")
    page.get_by_label("Photos").set_input_files(files)
    assert faults(page) == []
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("heading", name="People", exact=True)).to_be_visible(timeout=60_000)
    expect(page.get_by_text("6 photos, 10 faces.")).to_be_visible()
    groups = page.get_by_role("list", name="Groups")
    expect(groups.get_by_role("heading")).to_have_text(["Group 1", "Group 2"])
    expect(groups.locator("img.thumb").first).to_be_visible()
    (line,) = kith.audit("family", event="crop_read")
    assert (line.details["count"], len(line.details["faces"])) == (4, 4), "one request for all"
    page.set_viewport_size(PHONE)
    assert faults(page) == []

    # Two wrong faces: merge the people, and take them apart again by keyboard.
    groups.get_by_role("button", name="Merge Group 2").click()
    dialog = page.get_by_role("dialog", name="Merge two groups")
    expect(dialog.get_by_label("The same person as")).to_have_value("g1")
    assert faults(page) == []
    dialog.get_by_role("button", name="Merge", exact=True).click()
    expect(groups.get_by_role("heading")).to_have_text(["Group 1"])
    (album,) = kith.albums("family")
    first = list(kith.album_faces("family", album.id, "g1"))
    others = [face.photo for face in first if face.photo[:3] != first[0].photo[:3]]
    assert len(others) == 2
    for photo in others:
        groups.get_by_role("checkbox", name=photo).focus()
        page.keyboard.press("Space")
    page.get_by_role("button", name="Take 2 faces out").focus()
    page.keyboard.press("Enter")
    expect(groups.get_by_role("heading")).to_have_text(["Group 1", "Group 9"])

    # The enrollment, with a name.
    monkeypatch.setattr(usecase, "MAX_ENROLLED", 1)
    groups.get_by_role("button", name="Enroll Group 1", exact=True).click()
    dialog = page.get_by_role("dialog", name="Name this person")
    dialog.get_by_label("Name", exact=True).fill("Ada Lovelace")
    dialog.get_by_role("button", name="Enroll").click()
    expect(groups.get_by_role("heading")).to_have_text(["Group 9"])
    ada = kith.subject("family", "ada-lovelace")
    assert (ada.name, ada.template_count) == ("Ada Lovelace", 2)

    page.get_by_text("Single faces", exact=True).click()
    expect(page.get_by_role("list", name="Single faces").get_by_role("heading")).to_have_count(6)
    assert faults(page) == []

    # Another person under the same name is refused, and stays.
    groups.get_by_role("button", name="Enroll Group 9").click()
    dialog.get_by_label("Someone in this gallery").check()
    dialog.get_by_label("Who is it?").fill("Ada Lovelace (ada-lovelace)")
    dialog.get_by_role("button", name="Enroll").click()
    expect(groups.get_by_text("Refused faces")).to_be_visible()
    assert faults(page) == []
    groups.get_by_role("button", name="Enroll them anyway").click()
    page.get_by_role("dialog").get_by_role("button", name="Enroll", exact=True).click()
    expect(groups.get_by_role("heading")).to_have_count(0)
    assert kith.subject("family", "ada-lovelace").template_count == 4


def test_the_health_of_a_service_until_it_is_gone(visit: Opener, tmp_path: Path) -> None:
    with started(tmp_path) as (url, _):
        page = visit("/health", url)
        alert, refresh = page.get_by_role("alert"), page.get_by_role("button", name="Refresh")
        expect(page.get_by_text("is ready. All its dependencies work.")).to_be_visible()
        expect(page.get_by_role("table", name="Queues")).to_contain_text("recognizer/kith-compact")
        expect(page.get_by_role("table", name="Recognizers")).to_contain_text("recognition: ")
        answers(page, "/readyz", {"code": "storage_unavailable", "title": "No", "detail": "The disk."}, 503)
        refresh.click()
        alert.evaluate("(one) => (one.same = true)")
        with page.expect_response("**/v1/status"):
            refresh.click()
        expect(refresh).not_to_have_attribute("aria-busy", "true")
        assert alert.evaluate("(one) => one.same === true")
    page.get_by_role("link", name="Galleries").click()
    expect(alert).to_contain_text("The service does not answer")
    page.get_by_role("button", name="Try again").focus()
    page.keyboard.press("Enter")
    expect(alert).to_contain_text("The service does not answer")
    expect(page.locator(":focus")).to_have_count(1)


def test_somebody_is_found_whom_no_page_has_listed(visit: Opener, kith: Kith) -> None:
    """In the list of people, and where a person is chosen."""
    kith.create_gallery("family")
    for number in range(120):
        kith.put_subject("family", f"p{number:03}", name=f"Person {number}")
    kith.put_subject("family", "zoe", name="Zoë Ångström", tags=["a,b"])
    page = visit("/galleries/family")
    rows = page.locator(".people tbody tr")
    expect(rows).to_have_count(100)
    page.get_by_label("Find").fill("angstrom ZOE")
    expect(rows).to_have_count(1)
    page.get_by_role("link", name="a,b", exact=True).click()
    expect(page.get_by_text("1 person.")).to_be_visible()
    expect(page.get_by_role("link", name="Zoë Ångström")).to_be_visible()
    answers(page, "q=nobody", {"data": [], "next": "more"})  # the service looked at many, and goes on
    answers(page, "cursor=more", {"data": [], "next": None})
    page.get_by_label("Find").fill("nobody")
    expect(page.get_by_text("No person matches.")).to_be_visible()
    expect(page.get_by_text("0 people.", exact=True)).to_be_visible()
    go(page, "/enroll?gallery=family")
    page.get_by_label("Enrolled person").check()
    page.get_by_label("Whose photos are these?").fill("zoe")
    expect(page.locator("datalist option[value='Zoë Ångström (zoe)']")).to_have_count(1)


def test_photos_and_people_are_compared(visit: Opener, kith: Kith, photos: Photos) -> None:
    kith.create_gallery("doors", risk={"fmr": 0.0001})
    kith.enroll("doors", "ada", photos["ada"])
    page = visit("/compare", viewport=PHONE)
    strict = page.get_by_label("How strict")
    expect(strict).to_have_value("standard")
    first, second = (page.get_by_role("group", name=name) for name in ("First", "Second"))
    for photo in ("tom", "ada again"):  # the second in the place of the first
        first.dispatch_event("drop", {"dataTransfer": transfer(page, photos[photo])})
        expect(first.get_by_role("img", name=f"{photo}.jpg")).to_be_visible()
    second.dispatch_event("drop", {"dataTransfer": transfer(page, photos["ada"])})
    answer = page.get_by_role("heading", name="The same person")
    expect(answer).to_be_in_viewport(ratio=1)
    assert faults(page) == []
    second.get_by_label("An enrolled person").check()
    expect(strict.locator("option:checked")).to_have_text("Gallery setting: one pair of strangers in 10,000")
    with page.expect_response("**/v1/verify") as answered:
        second.get_by_label("Person", exact=True).fill("ada")
        page.keyboard.press("Tab")
    assert answered.value.json()["risk"]["fmr"] == 0.0001
    expect(answer).to_be_visible()
    strict.select_option("relaxed")  # the user's choice stays when the photos change
    for other in ("A photo", "An enrolled person"):
        second.get_by_label(other, exact=True).check()
        expect(strict.locator("option")).to_have_count(3 if other == "A photo" else 4)
        expect(strict).to_have_value("relaxed")
    first.get_by_label("An enrolled person").check()  # one side may be a person
    expect(second.get_by_label("A photo", exact=True)).to_be_checked()

"""Pages that stay open: they refresh, or show that their content is outdated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, expect

from kith import Kith
from tests.browser.conftest import Opener, choose, transfer

Photos = dict[str, Path]
Answer = Callable[[Route], Any]
REFUSAL = {"code": "no_face", "title": "No face", "detail": "None was found.", "remedy": ""}


def answers(page: Page, pattern: str, answer: Answer, status: int = 200) -> None:
    """Responses of the service, for states that take long to reach."""

    def fulfill(route: Route) -> None:
        route.fulfill(status=status, content_type="application/json", body=json.dumps(answer(route)))

    page.route(re.compile(pattern), fulfill)


def asked(route: Route) -> dict[str, str]:
    return dict(part.split("=") for part in route.request.url.partition("?")[2].split("&") if part)


def job(number: int, **state: Any) -> dict[str, Any]:
    about = {
        "kind": "enrollment",
        "gallery": "family",
        "total_count": 100,
        "rate": 1,
        "remaining_s": 9,
        "canceling": False,
    }
    counted = {"state": "running", "done_count": 3, "failed_count": 0, "counts": {}, "problem": None}
    return {"id": f"{number:032x}", "updated_at": "2026-01-01T00:00:00Z", **about, **counted, **state}


def test_what_is_refused_while_one_looks_is_offered_and_listed_once(visit: Opener, populated: str) -> None:
    page = visit(populated)
    failed = [3]

    def items(route: Route) -> Any:
        first, limit = int(asked(route).get("cursor", 0)), int(asked(route)["limit"])
        rows = [{"item": f"photo {i}", "problem": REFUSAL} for i in range(first, min(failed[0], first + limit))]
        return {"data": rows, "next": str(first + limit) if failed[0] > first + limit else None}

    answers(page, r"/v1/jobs\?", lambda _: {"data": [job(1, failed_count=failed[0])], "next": None})
    answers(page, "/items", items)
    page.goto(f"{populated}/console#/jobs")
    page.clock.install()
    page.reload()
    rows = page.locator(".refusals li")
    for _ in range(3):  # opened, closed, opened before the first response arrives
        page.locator("details.items summary").click()
    expect(rows).to_have_count(3)
    page.wait_for_load_state("networkidle")  # the last request
    failed[0] = 60
    page.clock.run_for(2000)
    page.get_by_role("button", name="Show more").click()
    expect(rows).to_have_count(53)
    page.get_by_role("button", name="Show more").click()
    expect(rows).to_have_count(60)
    expect(page.get_by_role("button", name="Show more")).to_have_count(0)


def test_more_jobs_than_a_page_holds_are_shown(visit: Opener, populated: str) -> None:
    page = visit(populated)

    def jobs(route: Route) -> Any:
        limit = int(asked(route)["limit"])
        return {"data": [job(i, state="succeeded") for i in range(min(70, limit))], "next": "x" if limit < 70 else None}

    answers(page, r"/v1/jobs\?", jobs)
    page.goto(f"{populated}/console#/jobs")
    expect(page.locator(".job")).to_have_count(50)
    page.get_by_role("button", name="Show more").click()
    expect(page.locator(".job")).to_have_count(70)
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()


def test_what_is_not_renewed_says_since_when_and_why(visit: Opener, populated: str) -> None:
    page = visit(populated)
    page.clock.install()
    answers(page, r"/v1/jobs\?", lambda _: {"data": [job(1)], "next": None})
    page.goto(f"{populated}/console#/jobs")
    expect(page.locator(".job")).to_have_count(1)
    page.unroute_all()
    answers(page, r"/v1/jobs\?", lambda _: {"code": "forbidden", "detail": "this needs the scope 'read'"}, 403)
    page.clock.run_for(2000)
    note = page.get_by_role("status").filter(has_text="Not updated since")
    expect(note).to_contain_text("This needs the scope 'read'.")
    expect(page.locator(".job")).to_have_count(1)
    page.unroute_all()
    answers(page, r"/v1/jobs\?", lambda _: {"data": [job(1, done_count=50)], "next": None})
    note.get_by_role("button", name="Refresh").click()
    expect(page.get_by_text("50 of 100 items")).to_be_visible()
    expect(note).to_have_count(0)


def test_the_button_keeps_the_focus_while_a_recognizer_is_made_ready(visit: Opener, populated: str) -> None:
    page = visit(populated)
    page.clock.install()
    embedded = [3]

    def generation(name: str, known: int) -> dict[str, Any]:
        return {
            "model": name,
            "recognizer": name * 8,
            "served": True,
            "template_count": 9,
            "embedded_count": known,
            "threshold": None,
        }

    def state(_: Route) -> Any:
        generations = {"current": generation("old", 9), "other": generation("new", embedded[0])}
        left = {"without_crop_count": 0, "without_crop": []}
        return {"state": "running", "jobs": ["one"], **generations, **left}

    answers(page, "/migrate$", state)
    page.goto(f"{populated}/console#/galleries/family/recognizer")
    stop = page.get_by_role("button", name="Stop the migration")
    stop.focus()
    embedded[0] = 7
    page.clock.run_for(2000)
    expect(page.get_by_text("7 of 9 photos embedded")).to_be_visible()
    expect(stop).to_be_focused()


def test_a_problem_that_lasts_is_read_aloud_once(visit: Opener, populated: str) -> None:
    page = visit(populated)
    answers(page, "/readyz", lambda _: {"code": "storage_unavailable", "title": "No", "detail": "The disk."}, 503)
    page.goto(f"{populated}/console#/health")
    alert = page.get_by_role("alert")
    alert.evaluate("(one) => (one.same = true)")
    with page.expect_response("**/v1/status"):
        page.get_by_role("button", name="Refresh").click()
    expect(page.get_by_role("button", name="Refresh")).not_to_have_attribute("aria-busy", "true")
    assert alert.evaluate("(one) => one.same === true")


def some_people(route: Route) -> Any:
    """Page of 3,000 subjects, or the one whose id is searched for, after an empty page."""
    query = asked(route)
    if "q" in query and "cursor" not in query:
        return {"data": [], "next": query["q"].removeprefix("p")}
    if "q" in query:
        query["limit"] = "1"
    first, last = int(query.get("cursor", 0)), min(3000, int(query.get("cursor", 0)) + int(query["limit"]))
    one: dict[str, Any] = {"name": None, "tags": [], "template_count": 1, "created_at": "2026-01-01T00:00:00Z"}
    found = [{"id": f"p{i}", **one} for i in range(first, last)]
    return {"data": found, "next": str(last) if last < 3000 else None}


def test_many_people_are_loaded_in_few_requests_and_found(visit: Opener, populated: str) -> None:
    page = visit(populated)
    asks = []

    def people(route: Route) -> Any:
        asks.append(asked(route)["limit"])
        return some_people(route)

    answers(page, r"/family/subjects\?", people)
    page.goto(f"{populated}/console#/galleries/family")
    rows = page.locator(".people tbody tr")
    for shown in range(100, 700, 100):
        expect(rows).to_have_count(shown)
        page.get_by_role("button", name="Show more").click()
    expect(rows).to_have_count(700)
    page.get_by_role("button", name="Load all").click()
    expect(page.get_by_text("3,000 people of 3,000, 700 listed.")).to_be_visible()
    expect(rows).to_have_count(700)
    assert asks == ["100"] * 7 + ["1000"] * 3
    page.get_by_role("button", name="Show more").click()
    expect(rows).to_have_count(1200)
    page.get_by_label("Find").fill("p2999")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("p2999")


def test_somebody_is_found_whom_no_page_has_listed(visit: Opener, populated: str, photos: Photos) -> None:
    """In the list of people, and where a person is chosen."""
    with Kith(populated) as kith:
        for number in range(120):
            kith.put_subject("family", f"p{number:03}", name=f"Person {number}")
        kith.put_subject("family", "zoe", name="Zoë Ångström")
    page = visit(populated)
    page.goto(f"{populated}/console#/galleries/family")
    rows = page.locator(".people tbody tr")
    expect(rows).to_have_count(100)
    page.get_by_label("Find").fill("angstrom ZOE")
    expect(rows).to_have_count(1)
    expect(page.get_by_role("link", name="Zoë Ångström")).to_be_visible()
    page.get_by_label("Find").fill("nobody")
    expect(page.get_by_text("No person matches.")).to_be_visible()

    page.goto(f"{populated}/console#/enroll?gallery=family")
    choose(page, photos["ada"])
    page.get_by_label("Enrolled person").check()
    page.get_by_label("Whose photos are these?").fill("zoe")
    expect(page.locator("datalist option[value='Zoë Ångström (zoe)']")).to_have_count(1)


def test_an_import_says_that_it_runs_and_what_was_refused(
    visit: Opener, service: str, photos: Photos, tmp_path: Path
) -> None:
    file = tmp_path / "people.ndjson"
    with Kith(service) as kith:
        kith.create_gallery("family")
        file.write_bytes(b"".join(kith.export_gallery("family")) + b'{"subject": 1}\n')
    page = visit(service)
    waiting: list[Route] = []
    page.route(re.compile("/import$"), lambda route: waiting.append(route))
    page.goto(f"{service}/console#/galleries/family/settings")
    choose(page, file, button="Import")
    expect(page.get_by_text("Importing “people.ndjson”.")).to_be_visible()
    expect(page.get_by_role("button", name="Import")).to_be_disabled()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("The import was canceled.")).to_be_visible()

    choose(page, file, button="Import")
    expect(page.get_by_text("Importing “people.ndjson”.")).to_be_visible()
    page.get_by_role("link", name="Health").click()
    expect(page.locator(".toast")).to_contain_text("The import was canceled.")
    page.unroute_all()
    page.go_back()
    choose(page, file, button="Import")
    expect(page.get_by_text(re.compile("Refused: [12]"))).to_be_visible()
    expect(page.locator(".refusals")).to_contain_text("line 2")


def test_all_photos_of_somebody_are_listed(visit: Opener, populated: str) -> None:
    page = visit(populated)

    def photos(route: Route) -> Any:
        first = int(asked(route).get("cursor", 0))
        kept = [{"id": f"{first + i:032x}", "quality": None, "created_at": "2026-01-01T00:00:00Z"} for i in range(2)]
        return {"data": kept, "next": "2" if first == 0 else None}

    answers(page, r"/tom/templates\?", photos)
    page.goto(f"{populated}/console#/galleries/family/subjects/tom")
    expect(page.get_by_role("heading", name="4 photos")).to_be_visible()


def test_the_audit_speaks_in_words_and_of_seconds(visit: Opener, populated: str) -> None:
    page = visit(populated)
    page.goto(f"{populated}/console#/settings/audit")
    page.get_by_label("What").select_option("gallery_created")  # earlier tests searched
    made = page.get_by_role("row").filter(has_text="Created the gallery in “family”.").first
    expect(made.get_by_title("gallery_created")).to_be_visible()
    expect(made.get_by_role("cell").first).to_contain_text(re.compile(r"\d{4}.*\d:\d\d:\d\d.*[A-Z]"))
    expect(page.get_by_role("option", name="Migration: switched to new recognizer")).to_have_count(1)
    page.get_by_label("What").select_option("")
    page.get_by_label("In gallery").fill("family")
    page.get_by_label("About the person").fill("tom")
    page.get_by_label("About the person").press("Enter")
    expect(
        page.get_by_role("row").filter(has_text=re.compile("Enrolled 1 photo of person .* in “family”.")).first
    ).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="Created the gallery")).to_have_count(0)
    page.get_by_label("Until").fill("2020-01-31")
    expect(page.get_by_role("heading", name="No matching lines")).to_be_visible()


def test_the_photo_is_there_after_one_of_its_faces_was_enrolled(visit: Opener, service: str, photos: Photos) -> None:
    with Kith(service) as kith:
        kith.create_gallery("family")
        kith.enroll("family", "tom", photos["tom"])
    page = visit(service)
    choose(page, photos["tom"], photos["ada"])
    spoken = page.get_by_role("status")
    expect(spoken.filter(has_text="tom.jpg. 1 face: 1 known. tom.")).to_have_count(1)
    page.get_by_role("button", name="Photo 2, ada.jpg: 1 face").click()
    page.get_by_role("link", name="Enroll this face").click()
    expect(page.get_by_text("good photo of a face")).to_be_visible()
    page.get_by_label("Name", exact=True).fill("Ada")
    page.get_by_role("button", name="Enroll", exact=True).click()
    page.get_by_role("link", name="Try it: identify").click()
    expect(page.get_by_role("button", name=re.compile("Photo [12]"))).to_have_count(2)
    expect(page.get_by_role("article", name="Face 1").get_by_role("link", name="Ada")).to_be_visible()
    expect(spoken.filter(has_text="ada.jpg. 1 face: 1 known. Ada.")).to_have_count(1)


def test_who_removes_a_photo_is_at_the_next(visit: Opener, populated: str, photos: Photos) -> None:
    page = visit(populated)
    page.goto(f"{populated}/console#/enroll?gallery=empty")
    choose(page, photos["ada"], photos["tom"])
    remove = page.get_by_role("button", name="Remove", exact=True)
    expect(page.get_by_text("good photo of a face")).to_have_count(2)
    remove.first.focus()
    page.keyboard.press("Enter")
    expect(remove).to_have_count(1)
    expect(remove).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Choose photos")).to_be_focused()


def test_a_comparison_with_somebody_goes_by_their_gallery(visit: Opener, service: str, photos: Photos) -> None:
    with Kith(service) as kith:
        kith.create_gallery("doors", risk={"fmr": 0.0001})
        kith.enroll("doors", "ada", photos["ada"])
    page = visit(service)
    page.goto(f"{service}/console#/compare")
    strict = page.get_by_label("How strict")
    expect(strict).to_have_value("standard")
    first, second = (page.get_by_role("group", name=name) for name in ("First", "Second"))
    for photo in ("tom", "ada again"):  # the second in the place of the first
        first.dispatch_event("drop", {"dataTransfer": transfer(page, photos[photo])})
        expect(first.get_by_role("img", name=f"{photo}.jpg")).to_be_visible()
    second.get_by_label("An enrolled person").check()
    expect(strict.locator("option:checked")).to_have_text("Gallery setting: one pair of strangers in 10,000")
    with page.expect_response("**/v1/verify") as answered:
        second.get_by_label("Person", exact=True).fill("ada")
        page.keyboard.press("Tab")
    assert answered.value.json()["risk"]["fmr"] == 0.0001
    expect(page.get_by_role("heading", name="The same person")).to_be_visible()
    strict.select_option("relaxed")  # the user's choice stays when the photos change
    for other in ("A photo", "An enrolled person"):
        second.get_by_label(other, exact=True).check()
        expect(strict.locator("option")).to_have_count(3 if other == "A photo" else 4)
        expect(strict).to_have_value("relaxed")


def test_nothing_stays_of_whom_hygiene_names_no_more(visit: Opener, populated: str) -> None:
    page = visit(populated)
    page.goto(f"{populated}/console#/galleries/family/hygiene")
    held = "localStorage.getItem('kith-aside-family')"
    page.get_by_role("button", name="They are two people").first.click()
    assert "ada" in page.evaluate(held)
    known = [*json.loads(page.evaluate(held)), '["lookalikes",["eve","ada"],[]]']
    page.evaluate("(known) => localStorage.setItem('kith-aside-family', known)", json.dumps(known))
    page.reload()
    expect(page.get_by_text("dismissed.")).to_be_visible()
    kept = page.evaluate(held)
    assert "eve" not in kept
    assert "ada" in kept

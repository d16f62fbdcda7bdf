"""Pages that stay open: they refresh, or show that their content is outdated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, expect

from kith import Kith
from tests.browser.chromium import faults
from tests.browser.conftest import Opener, choose, go, transfer

Photos = dict[str, Path]
REFUSAL = {"code": "no_face", "title": "No face", "detail": "None was found.", "remedy": ""}


def answers(page: Page, pattern: str, answer: dict[str, Any], status: int = 200) -> None:
    """Answer requests as the service does in states that take long to reach."""
    page.route(re.compile(pattern), lambda route: route.fulfill(status=status, json=answer))


def jobs(**state: Any) -> dict[str, Any]:
    about = {"id": "1" * 32, "kind": "enrollment", "gallery": "family", "updated_at": "2026-01-01T00:00:00Z"}
    rate = {"total_count": 100, "rate": 1, "remaining_s": 9, "canceling": False, "counts": {}, "problem": None}
    now = {**about, **rate, "state": "running", "done_count": 3, "failed_count": 0, **state}
    return {"data": [now], "next": None}


def test_jobs_list_their_refused_items_in_pages_and_say_since_when_they_are_not_renewed(
    visit: Opener, populated: str
) -> None:
    page = visit(populated)

    def items(route: Route) -> None:
        is_first = "cursor=" not in route.request.url
        rows = [{"item": f"photo {i}", "problem": REFUSAL} for i in range(50 if is_first else 10)]
        route.fulfill(json={"data": rows, "next": "50" if is_first else None})

    page.clock.install()
    answers(page, r"/v1/jobs\?", jobs(failed_count=60))
    page.route(re.compile("/items"), items)
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
    answers(page, r"/v1/jobs\?", jobs(done_count=50))
    note.get_by_role("button", name="Refresh").click()
    expect(page.get_by_text("50 of 100 items")).to_be_visible()
    expect(note).to_have_count(0)


def test_health_says_what_runs_and_a_lasting_problem_is_read_aloud_once(visit: Opener, populated: str) -> None:
    page = visit(populated, "/health")
    expect(page.get_by_text("is ready. All its dependencies work.")).to_be_visible()
    expect(page.get_by_role("table", name="Queues")).to_contain_text("recognizer/kith-compact")
    expect(page.get_by_role("table", name="Recognizers")).to_contain_text("recognition: ")
    answers(page, "/readyz", {"code": "storage_unavailable", "title": "No", "detail": "The disk."}, 503)
    page.get_by_role("button", name="Refresh").click()
    alert = page.get_by_role("alert")
    alert.evaluate("(one) => (one.same = true)")
    with page.expect_response("**/v1/status"):
        page.get_by_role("button", name="Refresh").click()
    expect(page.get_by_role("button", name="Refresh")).not_to_have_attribute("aria-busy", "true")
    assert alert.evaluate("(one) => one.same === true")


def test_somebody_is_found_whom_no_page_has_listed(visit: Opener, populated: str) -> None:
    """In the list of people, and where a person is chosen."""
    with Kith(populated) as kith:
        for number in range(120):
            kith.put_subject("family", f"p{number:03}", name=f"Person {number}")
        kith.put_subject("family", "zoe", name="Zoë Ångström", tags=["a,b"])
    page = visit(populated, "/galleries/family")
    rows = page.locator(".people tbody tr")
    expect(rows).to_have_count(100)
    page.get_by_label("Find").fill("angstrom ZOE")
    expect(rows).to_have_count(1)
    page.get_by_role("link", name="a,b", exact=True).click()
    expect(page.get_by_text("1 person.")).to_be_visible()
    expect(page.get_by_role("link", name="Zoë Ångström")).to_be_visible()
    expect(page.get_by_label("Tags", exact=True)).to_have_value('"a,b"')
    page.get_by_label("Find").fill("nobody")
    expect(page.get_by_text("No person matches.")).to_be_visible()
    go(page, "/enroll?gallery=family")
    page.get_by_label("Enrolled person").check()
    page.get_by_label("Whose photos are these?").fill("zoe")
    expect(page.locator("datalist option[value='Zoë Ångström (zoe)']")).to_have_count(1)


def test_the_audit_speaks_in_words_and_of_seconds(visit: Opener, populated: str) -> None:
    page = visit(populated, "/settings/audit")
    page.get_by_text("Filter", exact=True).click()
    page.get_by_label("What").select_option("gallery_created")  # earlier tests searched
    made = page.get_by_role("row").filter(has_text="Gallery created in “family”").first
    expect(made.get_by_role("cell").first).to_contain_text(re.compile(r"\d{4}.*\d:\d\d:\d\d.*[A-Z]"))
    page.get_by_label("What").select_option("")
    page.get_by_label("In gallery").fill("family")
    page.get_by_label("About the person").fill("tom")
    page.get_by_label("About the person").press("Enter")
    expect(page.get_by_role("row").filter(has_text="Enrollment in “family”").first).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="Gallery created")).to_have_count(0)
    page.get_by_label("Until").fill("2020-01-31")
    expect(page.get_by_role("heading", name="No matching lines")).to_be_visible()


def test_who_removes_a_photo_is_at_the_next(visit: Opener, populated: str, photos: Photos) -> None:
    page = visit(populated, "/enroll?gallery=empty")
    choose(page, photos["ada"], photos["tom"])
    remove = page.get_by_role("button", name="Remove", exact=True)
    expect(page.get_by_text("good photo of a face")).to_have_count(2)
    remove.first.focus()
    page.keyboard.press("Enter")
    expect(remove).to_have_count(1)
    expect(remove).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Choose photos")).to_be_focused()


def test_two_photos_are_compared_and_one_with_somebody_by_their_gallery(
    visit: Opener, service: str, kith: Kith, photos: Photos
) -> None:
    kith.create_gallery("doors", risk={"fmr": 0.0001})
    kith.enroll("doors", "ada", photos["ada"])
    page = visit(service, "/compare")
    strict = page.get_by_label("How strict")
    expect(strict).to_have_value("standard")
    first, second = (page.get_by_role("group", name=name) for name in ("First", "Second"))
    for photo in ("tom", "ada again"):  # the second in the place of the first
        first.dispatch_event("drop", {"dataTransfer": transfer(page, photos[photo])})
        expect(first.get_by_role("img", name=f"{photo}.jpg")).to_be_visible()
    second.dispatch_event("drop", {"dataTransfer": transfer(page, photos["ada"])})
    expect(page.get_by_role("heading", name="The same person")).to_be_visible()
    assert faults(page) == []
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

"""Console and API reference below a path prefix, through a real reverse proxy."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from kith import Kith
from tests.browser.conftest import KEY, Opener, choose, give_key
from tests.reverse_proxies import PREFIX, PROXIES


@pytest.fixture(scope="module", params=["python", "nginx"])
def prefixed(locked: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    with PROXIES[request.param](locked, tmp_path_factory.mktemp("proxy")) as url:
        yield url


def test_the_console_works_below_a_prefix(visit: Opener, prefixed: str, photos: dict[str, Path]) -> None:
    page = visit(prefixed)
    outside = leaving(page, prefixed)
    page.goto(f"{prefixed}/")
    expect(page).to_have_url(f"{prefixed}/console")
    give_key(page, remember=True)
    stored = page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('kith-key'))")
    assert stored == [f"kith-key{PREFIX}/"]  # services of one host keep their own keys
    page.reload()
    for place in ("Enroll", "Compare", "Galleries", "Jobs", "Health"):
        page.get_by_role("link", name=place, exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
    page.goto(f"{prefixed}/console#/galleries/family/subjects/ada")
    expect(page.get_by_role("heading", name="Ada Lovelace")).to_be_visible()
    page.goto(f"{prefixed}/console#/identify?gallery=family")
    choose(page, photos["tom"])
    expect(page.get_by_text("Known", exact=True)).to_be_visible()
    assert outside == []


def test_files_are_sent_and_fetched_below_a_prefix(
    visit: Opener, prefixed: str, locked: str, photos: dict[str, Path], tmp_path: Path
) -> None:
    """Archives and albums carry the key and photos: none of them may go to the root of the host."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.write(photos["ada"], "ada/1.jpg")
    archived = tmp_path / "people.zip"
    archived.write_bytes(content.getvalue())
    gallery = tmp_path.name.replace("_", "-")
    page = visit(prefixed)
    outside = leaving(page, prefixed)
    give_key(page)
    with Kith(locked, KEY) as kith:
        kith.create_gallery(gallery)
        page.goto(f"{prefixed}/console#/jobs?gallery={gallery}")
        page.get_by_role("button", name="Enroll many people").first.click()
        page.get_by_label("Gallery").last.select_option(gallery)
        page.get_by_label("Archive").set_input_files(archived)
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_text("Enrolled: 1")).to_be_visible()

        page.goto(f"{prefixed}/console#/galleries/{gallery}/albums")
        page.get_by_role("button", name="New album").first.click()
        page.get_by_label("Photos").set_input_files([photos["ada"], photos["tom"]])
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_text("2 photos, 2 faces.")).to_be_visible()

        page.goto(f"{prefixed}/console#/galleries/{gallery}/settings")
        with page.expect_download() as exported:
            page.get_by_role("button", name="Export").click()
        exported.value.save_as(tmp_path / "people.ndjson")
        assert (tmp_path / "people.ndjson").stat().st_size > 1000
    assert outside == []


def leaving(page: Page, prefixed: str) -> list[str]:
    """Return a list that gets the address of each request outside of the prefix."""
    outside: list[str] = []
    inside = (f"{prefixed}/", "blob:", "data:")
    page.on("request", lambda request: None if request.url.startswith(inside) else outside.append(request.url))
    return outside


def test_the_reference_sends_requests_below_the_prefix_and_none_elsewhere(visit: Opener, prefixed: str) -> None:
    page = visit(prefixed)
    outside = leaving(page, prefixed)
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("link", name="API reference").click()
    expect(page).to_have_url(f"{prefixed}/docs")
    page.locator("#operations-system-getHealth").click()
    page.get_by_role("button", name="Try it out").click()
    with page.expect_response(f"{prefixed}/healthz") as answer:
        page.get_by_role("button", name="Execute").click()
    assert answer.value.ok
    assert outside == []

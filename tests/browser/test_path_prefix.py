"""Console and API reference below a path prefix, through a real reverse proxy: nothing goes to the root of the host."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from kith import Kith
from tests.browser.conftest import KEY, Opener, choose, give_key, go
from tests.reverse_proxies import PREFIX, PROXIES


@pytest.fixture(scope="module", params=["python", "nginx"])
def prefixed(locked: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    with PROXIES[request.param](locked, tmp_path_factory.mktemp("proxy")) as url:
        yield url


def test_everything_is_sent_and_fetched_below_the_prefix(
    visit: Opener, prefixed: str, locked: str, photos: dict[str, Path], tmp_path: Path
) -> None:
    page, outside = visit(prefixed), list[str]()
    inside = (f"{prefixed}/", "blob:", "data:")
    page.on("request", lambda request: None if request.url.startswith(inside) else outside.append(request.url))
    page.goto(f"{prefixed}/")
    expect(page).to_have_url(f"{prefixed}/console")
    give_key(page, remember=True)
    stored = page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('kith-key'))")
    assert stored == [f"kith-key{PREFIX}/"]  # services of one host keep their own keys
    for place in ("Enroll", "Compare", "Galleries", "Jobs", "Health"):
        page.get_by_role("link", name=place, exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
    go(page, "/identify?gallery=family")
    choose(page, photos["tom"])
    expect(page.get_by_text("Known", exact=True)).to_be_visible()

    # Archives and albums go by another way than photos, and downloads come by it.
    gallery, archive = tmp_path.name.replace("_", "-"), tmp_path / "people.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.write(photos["ada"], "ada/1.jpg")
    with Kith(locked, KEY) as kith:
        kith.create_gallery(gallery)
    go(page, f"/jobs?gallery={gallery}")
    page.get_by_role("button", name="Enroll many people").first.click()
    page.get_by_label("Archive").set_input_files(archive)
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("Enrolled: 1")).to_be_visible()
    go(page, f"/galleries/{gallery}/albums")
    page.get_by_role("button", name="New album").first.click()
    page.get_by_label("Photos").set_input_files([photos["ada"], photos["tom"]])
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("2 photos, 2 faces.")).to_be_visible()
    go(page, f"/galleries/{gallery}/settings")
    with page.expect_download() as exported:
        page.get_by_role("button", name="Export").click()
    assert "ada" in exported.value.path().read_text()

    page.get_by_role("link", name="API reference").click()
    expect(page).to_have_url(f"{prefixed}/docs")
    page.locator("#operations-system-getHealth").click()
    page.get_by_role("button", name="Try it out").click()
    with page.expect_response(f"{prefixed}/healthz") as answer:
        page.get_by_role("button", name="Execute").click()
    assert answer.value.ok
    assert outside == []

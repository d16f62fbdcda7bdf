"""Console and API reference below a path prefix, through a real reverse proxy: nothing goes to the root of the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import KEY, Opener, Photos, choose, give_key, go, populate, started
from tests.reverse_proxies import PREFIX, python_proxy


@pytest.fixture
def prefixed(tmp_path: Path, photos: Photos) -> Iterator[str]:
    with started(tmp_path, api_key=KEY) as (upstream, kith), python_proxy(upstream, tmp_path) as url:
        populate(kith, "family", photos)
        yield url


def test_everything_is_sent_and_fetched_below_the_prefix(visit: Opener, prefixed: str, photos: Photos) -> None:
    page, outside = visit("", prefixed), list[str]()
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

    # Archives go by another way than photos, and downloads come by it.
    go(page, "/galleries/family/albums")
    page.get_by_role("button", name="New album").first.click()
    page.get_by_label("Photos").set_input_files([photos["ada"], photos["tom"]])
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("2 photos, 2 faces.")).to_be_visible()
    go(page, "/galleries/family/settings")
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

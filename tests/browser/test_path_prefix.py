"""Console and API reference below a path prefix, through a real reverse proxy: nothing goes to the root of the host."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from tests.browser.conftest import KEY, Opener, Photos, choose, give_key, go, populate, started
from tests.reverse_proxies import python_proxy


def test_everything_is_sent_and_fetched_below_the_prefix(visit: Opener, photos: Photos, tmp_path: Path) -> None:
    with started(tmp_path, api_key=KEY) as (upstream, kith), python_proxy(upstream, tmp_path) as prefixed:
        populate(kith, "family", photos)
        page, outside = visit("", prefixed), list[str]()
        inside = (f"{prefixed}/", "blob:", "data:")
        page.on("request", lambda request: None if request.url.startswith(inside) else outside.append(request.url))
        page.goto(f"{prefixed}/")
        expect(page).to_have_url(f"{prefixed}/console")
        give_key(page)
        go(page, "/identify?gallery=family")
        choose(page, photos["tom"])
        expect(page.get_by_text("Known", exact=True)).to_be_visible()

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

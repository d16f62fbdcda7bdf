"""Console and API reference below a path prefix, through a real reverse proxy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from kith import Kith
from service.server import embedded
from service.settings import load_settings
from tests.browser.conftest import Opener, choose, populate
from tests.reverse_proxies import PREFIX, PROXIES

KEY = "the-operator-s-key-of-more-than-enough-characters"


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory, photos: dict[str, Path]) -> Iterator[str]:
    """Service without a proxy, with a key and a gallery of three subjects."""
    settings = load_settings(data_dir=tmp_path_factory.mktemp("direct"), api_key=KEY, log_level="ERROR")
    with embedded(settings) as url, Kith(url, KEY) as kith:
        kith.create_gallery("family")
        populate(kith, "family", photos)
        yield url


@pytest.fixture(scope="module", params=["python", "nginx"])
def prefixed(direct: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    with PROXIES[request.param](direct, tmp_path_factory.mktemp("proxy")) as url:
        yield url


def test_the_console_works_below_a_prefix(visit: Opener, prefixed: str, photos: dict[str, Path]) -> None:
    page = visit(prefixed)
    outside: list[str] = []
    page.on("request", lambda request: outside.append(request.url) if f"{PREFIX}/" not in request.url else None)
    page.goto(f"{prefixed}/")
    expect(page).to_have_url(f"{prefixed}/console")
    dialog = page.get_by_role("dialog", name="Your key")
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_have_count(0)
    for place in ("Enroll", "Compare", "Galleries", "Jobs", "Health"):
        page.get_by_role("link", name=place, exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
    page.goto(f"{prefixed}/console#/galleries/family/subjects/ada")
    expect(page.get_by_role("heading", name="Ada Lovelace")).to_be_visible()
    page.goto(f"{prefixed}/console#/identify?gallery=family")
    choose(page, photos["tom"])
    expect(page.get_by_text("Known", exact=True)).to_be_visible()
    assert [url for url in outside if not url.startswith("blob:")] == []


def test_the_reference_sends_requests_below_the_prefix(visit: Opener, prefixed: str) -> None:
    page = visit(prefixed)
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("link", name="API reference").click()
    expect(page).to_have_url(f"{prefixed}/docs")
    page.locator("#operations-system-getHealth").click()
    page.get_by_role("button", name="Try it out").click()
    with page.expect_response(f"{prefixed}/healthz") as answer:
        page.get_by_role("button", name="Execute").click()
    assert answer.value.ok


def test_services_of_one_host_keep_their_own_keys(visit: Opener, prefixed: str) -> None:
    page = visit(prefixed)
    dialog = page.get_by_role("dialog", name="Your key")
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_label("Remember it").check()
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_have_count(0)
    stored = page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('kith-key'))")
    assert stored == [f"kith-key{PREFIX}/"]
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(dialog).to_have_count(0)

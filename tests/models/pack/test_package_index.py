"""Package index lookups support both forms of the Simple API and pip's configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.errors import IndexFileError
from models.pack.download import Downloader
from models.pack.package_index import SIMPLE_JSON, find_file, index_urls
from tests.http_files import File, serving

FILE = "some_models-0.3.0.tar.gz"
HTML = f"""<!DOCTYPE html><html><body><h1>Links</h1>
<a href="../../files/{FILE}#sha256=abc" data-requires-python="&gt;=3">{FILE}</a><br>
<a href="/elsewhere/other-1.tar.gz">other-1.tar.gz</a></body></html>""".encode()
PAGE = "/simple/some-models/"


@pytest.fixture
def downloader() -> Iterator[Downloader]:
    with Downloader(attempts=1) as opened:
        yield opened


def page(*files: dict[str, str]) -> File:
    return File(json.dumps({"meta": {"api-version": "1.1"}, "files": files}).encode(), content_type=SIMPLE_JSON)


def test_html_and_json_pages_are_supported(downloader: Downloader) -> None:
    by_json = page({"filename": FILE, "url": "https://files.example/a/b.tar.gz", "hashes": ""})
    with serving({PAGE: File(HTML, content_type="text/html; charset=utf-8"), "/json/some-models/": by_json}) as server:
        assert find_file(downloader, "Some.Models", FILE, [f"{server.url}/simple"]) == f"{server.url}/files/{FILE}"
        assert find_file(downloader, "some_models", FILE, [f"{server.url}/json"]) == "https://files.example/a/b.tar.gz"
        assert all(SIMPLE_JSON in headers["accept"] for headers in server.headers)


def test_links_are_relative_to_the_redirected_page(downloader: Downloader) -> None:
    moved = {PAGE: File(b"", location="/new/simple/some-models/"), f"/new{PAGE}": File(HTML, content_type="text/html")}
    with serving(moved) as server:
        assert find_file(downloader, "some-models", FILE, [f"{server.url}/simple"]) == f"{server.url}/new/files/{FILE}"


def test_all_indexes_are_tried_and_all_problems_reported(downloader: Downloader) -> None:
    files = {
        f"/empty{PAGE}": page(),
        f"/broken{PAGE}": File(b"{", content_type=SIMPLE_JSON),
        PAGE: File(HTML, content_type="text/html"),
    }
    with serving(files) as server:
        bad = [f"{server.url}/{name}/simple" for name in ("none", "empty", "broken")]
        assert find_file(downloader, "some-models", FILE, [*bad, f"{server.url}/simple"]).endswith(FILE)
        with pytest.raises(IndexFileError, match=r"404.*does not list it.*not a Simple API page"):
            find_file(downloader, "some-models", FILE, bad)


def test_credentials_go_only_to_the_index_and_are_not_shown(downloader: Downloader) -> None:
    elsewhere = page({"filename": FILE, "url": "https://files.example/f"})
    with serving({PAGE: File(HTML, content_type="text/html"), f"/other{PAGE}": elsewhere}) as server:
        private = server.url.replace("http://", "http://me:secret@")
        assert find_file(downloader, "some-models", FILE, [f"{private}/simple"]) == f"{private}/files/{FILE}"
        assert all("authorization" in headers for headers in server.headers)
        found = find_file(downloader, "some-models", FILE, [f"{private}/other/simple"])
        assert found == "https://files.example/f"
        with pytest.raises(IndexFileError) as raised:
            find_file(downloader, "some-models", FILE, [f"{private}/none"])
        assert "secret" not in str(raised.value)


def test_indexes_come_from_pips_configuration(tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://one.example/simple/\n"
        "[install]\nextra-index-url =\n    https://me:p%40ss@two.example/simple\n    file:///opt/wheels\n"
    )
    by_file = {"PIP_CONFIG_FILE": str(config)}
    two = "https://me:p%40ss@two.example/simple"
    assert index_urls(by_file) == ["https://one.example/simple", two]
    assert index_urls(by_file | {"PIP_INDEX_URL": "https://three.example/s"}) == ["https://three.example/s", two]
    assert index_urls({"PIP_CONFIG_FILE": "/dev/null"}) == ["https://pypi.org/simple"]
    config.write_text("index-url = no section")
    with pytest.raises(IndexFileError, match="pip's configuration"):
        index_urls(by_file)

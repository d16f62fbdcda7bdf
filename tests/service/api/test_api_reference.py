"""API reference page: self-contained."""

from __future__ import annotations

import re

import httpx2 as httpx


def test_the_page_and_its_files_need_neither_a_key_nor_another_server(stranger: httpx.Client) -> None:
    page = stranger.get("/docs")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "default-src 'none'" in policy
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 4
    for path in loaded:
        assert path.startswith(("console/", "docs/")), path
        answer = stranger.get(path)
        assert answer.status_code == 200, path
        assert answer.content, path
    assert "<script>" not in page.text

"""Pages: the console and the reference, served without a key, with a policy that allows only their own scripts, and web
pages of other origins: none by default, and those of KITH_CORS_ORIGINS with a key.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx2 as httpx
import pytest

from service.core.errors import SettingsError
from service.settings import load_settings
from tests.service.api.conftest import KEY, ORIGIN

FOLDER = Path(__file__).parents[3] / "service" / "console"
SPECIFICATIONS = Path(__file__).parents[2] / "console"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*"))


@pytest.mark.parametrize("file", FILES)
def test_every_file_is_served_without_a_key_with_its_media_type(stranger: httpx.Client, file: str) -> None:
    path = "/console" if file == "index.html" else f"/console/{file}"
    answer = stranger.get(path)
    assert answer.status_code == 200
    assert answer.content == (FOLDER / file).read_bytes()
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = stranger.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_policy_allows_only_scripts_of_the_console(stranger: httpx.Client) -> None:
    policy = dict(
        part.split(" ", 1) for part in stranger.get("/console").headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in str(policy)


@pytest.mark.parametrize("file", FILES)
def test_no_file_uses_external_addresses_or_evaluates_strings(file: str) -> None:
    text = (FOLDER / file).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"https?://|//[a-z]+\.[a-z]|innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function", text
    )


def test_one_function_makes_the_addresses_of_the_service() -> None:
    """Another program may answer above the path prefix: an address that ignores it sends the key and photos there."""
    texts = {file: (FOLDER / file).read_text(encoding="utf-8") for file in FILES if file.endswith(".js")}
    for file, text in texts.items():
        sent = re.findall(r"\bfetch\(([^)]*\)?)", text) + re.findall(r"\.open\(\"[A-Z]+\", (\w+)", text)
        assert all(one.startswith(("address(", "url")) for one in sent), (file, sent)
        assert "url" not in {one[:3] for one in sent} or "const url = address(path);" in text, file
        assert not re.search(r"location\.(origin|href|host)|new (EventSource|WebSocket)|sendBeacon", text), file
        assert file == "store.js" or "import.meta" not in text, file
        assert not re.search(r"\b(href|src|action): [\"`]/", text), file


def test_the_root_redirects_to_the_console(stranger: httpx.Client) -> None:
    assert stranger.get("/").headers["location"] == "console"
    assert stranger.get("/console/").headers["location"] == "../console"


@pytest.mark.parametrize("file", sorted(path.name for path in SPECIFICATIONS.glob("*.test.mjs")))
def test_pure_functions_of_the_console(file: str) -> None:
    """Runs on the Node.js binary of Playwright's wheel."""
    driver = pytest.importorskip("playwright._impl._driver", reason="Playwright, which brings Node, is not installed")
    node, _ = driver.compute_driver_executable()
    ran = subprocess.run(
        [node, "--test", str(SPECIFICATIONS / file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_reference_and_its_files_need_neither_a_key_nor_another_server(stranger: httpx.Client) -> None:
    page = stranger.get("/docs")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy and "default-src 'none'" in policy
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 4
    assert all(path.startswith(("console/", "docs/")) and stranger.get(path).content for path in loaded)
    assert "<script>" not in page.text


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"}


def test_listed_origins_may_call_with_a_key(stranger: httpx.Client) -> None:
    allowed = stranger.options("/v1/galleries", headers=PREFLIGHT | {"Origin": ORIGIN})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    refused = stranger.options("/v1/galleries", headers=PREFLIGHT | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in refused.headers
    listed = stranger.get("/v1/galleries", headers={"Origin": ORIGIN, "X-API-Key": KEY})
    assert (listed.status_code, listed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "access-control-allow-credentials" not in listed.headers
    assert stranger.get("/v1/galleries", headers={"Origin": ORIGIN}).status_code == 401


@pytest.mark.parametrize("origins", ["*", "desk.example.org", "https://desk.example.org/", "https://Desk.example.org"])
def test_invalid_origins(origins: str) -> None:
    with pytest.raises(SettingsError, match="KITH_CORS_ORIGINS"):
        load_settings(cors_origins=origins)

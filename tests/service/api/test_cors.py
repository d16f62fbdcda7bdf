"""Web pages of other origins: none by default, and those of KITH_CORS_ORIGINS with a key."""

from __future__ import annotations

import httpx2 as httpx
import pytest

from service.core.errors import SettingsError
from service.settings import load_settings
from tests.service.api.conftest import KEY, ORIGIN

PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"}


def test_no_origin_is_allowed_by_default(server: str) -> None:
    response = httpx.options(f"{server}/v1/galleries", headers=PREFLIGHT | {"Origin": ORIGIN}, timeout=60)
    assert response.status_code >= 400
    assert "access-control-allow-origin" not in response.headers


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

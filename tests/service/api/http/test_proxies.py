"""Client addresses from X-Forwarded-For are trusted from listed proxies only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from service.api.http.auth import WRONG_KEY_LIMIT
from service.core.errors import SettingsError
from service.server import embedded
from service.settings import load_settings

PROXY, ANOTHER, UNTRUSTED = "127.0.0.2", "127.0.0.9", "127.0.1.1"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = load_settings(
        data_dir=tmp_path_factory.mktemp("kith"),
        api_key="x" * 32,
        trusted_proxies="127.0.0.2, 127.0.0.8/30",
        log_level="ERROR",
    )
    with embedded(settings) as address:
        yield address


def wrong_keys(url: str, source: str, forwarded: list[str]) -> list[int]:
    """Return the status of a request with a wrong key for each X-Forwarded-For."""
    transport = httpx.HTTPTransport(local_address=source)
    with httpx.Client(base_url=url, transport=transport, headers={"X-API-Key": "wrong"}) as client:
        return [client.get("/v1/models", headers={"X-Forwarded-For": each}).status_code for each in forwarded]


def test_clients_of_a_trusted_proxy_are_distinguished(url: str) -> None:
    many = WRONG_KEY_LIMIT.burst + 5
    assert set(wrong_keys(url, PROXY, [f"198.51.100.{n}" for n in range(many)])) == {401}
    assert wrong_keys(url, PROXY, ["203.0.113.1"] * many)[-5:] == [429] * 5
    assert wrong_keys(url, PROXY, ["203.0.113.2"]) == [401]
    assert wrong_keys(url, ANOTHER, ["203.0.113.1"]) == [429], "the same client through the network's other proxy"


def test_forged_addresses_are_ignored(url: str) -> None:
    many = WRONG_KEY_LIMIT.burst + 5
    assert wrong_keys(url, PROXY, [f"198.51.100.{n}, 203.0.113.3" for n in range(many)])[-5:] == [429] * 5
    assert wrong_keys(url, PROXY, [f"198.51.100.{n}, 203.0.113.4, {ANOTHER}" for n in range(many)])[-5:] == [429] * 5
    assert wrong_keys(url, UNTRUSTED, [f"198.51.100.{n}" for n in range(many)])[-5:] == [429] * 5


@pytest.mark.parametrize("wrong", ["*", "0.0.0.0/0", "::/0", "proxy.example.org", "10.0.0.1/8"])
def test_proxies_must_be_addresses(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="KITH_TRUSTED_PROXIES"):
        load_settings(data_dir=tmp_path, trusted_proxies=wrong)


def test_no_proxy_is_trusted_by_default(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, api_key="x" * 32, log_level="ERROR")
    assert settings.trusted_proxy_list == []
    many = WRONG_KEY_LIMIT.burst + 5
    with embedded(settings) as address:
        found = wrong_keys(address, "127.0.0.1", [f"198.51.{n}.1" for n in range(many)])
    assert found == [401] * WRONG_KEY_LIMIT.burst + [429] * 5

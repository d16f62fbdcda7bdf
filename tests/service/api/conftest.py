"""A server with an operator's key, the compatible API and an origin of web pages, shared by the tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx2 as httpx
import pytest

from service.server import embedded
from service.settings import Settings, load_settings

KEY = "the-operator-s-key-of-these-tests-and-more"
ORIGIN = "https://desk.example.org"


@dataclass(frozen=True)
class Guarded:
    """``settings``: of the running service, whose database the tests add keys to."""

    url: str
    settings: Settings


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Tests use galleries of their own."""
    settings = load_settings(
        data_dir=tmp_path_factory.mktemp("guarded"),
        api_key=KEY,
        compat="compreface",
        cors_origins=f"{ORIGIN}, http://a.test",
        log_level="INFO",
    )
    with embedded(settings) as url:
        yield Guarded(url, settings)


@pytest.fixture
def stranger(guarded: Guarded) -> Iterator[httpx.Client]:
    """Client of the guarded server that sends no key."""
    with httpx.Client(base_url=guarded.url, timeout=60) as client:
        yield client

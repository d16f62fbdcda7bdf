"""A server with an operator's key, the compatible API, an origin of web pages and a receiver of webhooks, shared by the
tests of a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import httpx2 as httpx
import pytest

from kith import Kith
from kith.wire.common import Scope
from service.security.api_keys import Rights
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.repositories.api_keys import KeyStore
from tests.databases import open_database
from tests.receivers import Receiver, receiving

KEY = "the-operator-s-key-of-these-tests-and-more"
ORIGIN = "https://desk.example.org"


@dataclass(frozen=True)
class Guarded:
    """``settings``: of the running service, whose database the tests add keys to."""

    url: str
    settings: Settings
    receiver: Receiver

    def token(self, *scopes: Scope, galleries: Sequence[str] = ()) -> str:
        """Return the token of a new key, for all galleries if none is given."""
        with closing(open_database(self.settings.sql_url)) as database:
            names = frozenset(galleries) if galleries else None
            return KeyStore(database).create("k", Rights(frozenset(scopes), names))[1]


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Tests use galleries of their own."""
    with receiving() as receiver:
        settings = load_settings(
            data_dir=tmp_path_factory.mktemp("guarded"),
            api_key=KEY,
            compat="compreface",
            cors_origins=f"{ORIGIN}, http://a.test",
            webhook_hosts=receiver.origin,
            log_level="INFO",
        )
        with embedded(settings) as url:
            yield Guarded(url, settings, receiver)


@pytest.fixture
def stranger(guarded: Guarded) -> Iterator[httpx.Client]:
    """Client of the guarded server that sends no key."""
    with httpx.Client(base_url=guarded.url, timeout=60) as client:
        yield client


@pytest.fixture
def operator(guarded: Guarded) -> Iterator[Kith]:
    """Client of the guarded server. Its webhooks and the gallery "door" are deleted after the test."""
    with Kith(guarded.url, KEY) as kith:
        yield kith
        for webhook in list(kith.webhooks()):
            kith.delete_webhook(webhook.id)
        for gallery in {"door", "other"} & kith.gallery_names():
            kith.delete_gallery(gallery)


@pytest.fixture
def receiver(guarded: Guarded) -> Receiver:
    """Receiver that the guarded server may send to."""
    guarded.receiver.messages.clear()
    return guarded.receiver

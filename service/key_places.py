"""API keys where they are kept: in the database itself, or behind a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any, Protocol

from pydantic import ValidationError

from service.api.key_schemas import KeyIn, KeyOut, NewKeyOut
from service.api.problems import validation_error
from service.client import Kith
from service.gallery.key_store import KeyStore
from service.opening import open_own_database
from service.security.acting import Actor, acting_as
from service.security.keys import Scope
from service.settings import Settings


class Keys(Protocol):
    """Here, or on a server."""

    def create_key(self, name: str, scopes: list[Scope], **options: Any) -> NewKeyOut: ...

    def api_keys(self, ended: bool = False) -> Iterable[KeyOut]: ...

    def revoke_key(self, key: str) -> KeyOut: ...

    def rotate_key(self, key: str, overlap_s: int) -> NewKeyOut: ...

    def gallery_names(self) -> set[str]: ...


class _Here:
    """In the database itself."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store

    def create_key(self, name: str, scopes: list[Scope], **options: Any) -> NewKeyOut:
        asked = _asked(name=name, scopes=scopes, **options)
        return NewKeyOut.of_new(
            *self._store.create(asked.name, asked.rights, asked.expires_at, asked.rate, asked.burst)
        )

    def api_keys(self, ended: bool = False) -> list[KeyOut]:
        return [KeyOut.of(key) for _, key in self._store.list_keys(ended)]

    def revoke_key(self, key: str) -> KeyOut:
        return KeyOut.of(self._store.revoke(key))

    def rotate_key(self, key: str, overlap_s: int) -> NewKeyOut:
        return NewKeyOut.of_new(*self._store.rotate(key, timedelta(seconds=overlap_s)))

    def gallery_names(self) -> set[str]:
        return self._store.gallery_names()


@contextmanager
def keys_of_server(url: str, key: str | None) -> Iterator[Keys]:
    with Kith(url, key) as kith:
        yield kith


@contextmanager
def keys_here(settings: Settings) -> Iterator[Keys]:
    """Those of the settings' database, as its operator. Raises MasterKeyError, StorageError."""
    with closing(open_own_database(settings)) as database, acting_as(Actor("operator")):
        yield _Here(KeyStore(database))


def _asked(**fields: Any) -> KeyIn:
    try:
        return KeyIn.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error.errors()) from error

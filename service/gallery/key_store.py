"""API keys in SQL. A key that was revoked is refused by the next request to any process.

All keys are held in memory, as of a version of theirs, and on SQLite of the file (docs/decisions/0034): where nothing
was written, a request asks nobody; else it reads one number, which whatever is done to keys draws anew. Rows are never
deleted, so that the last key that is revoked does not leave the service open. Each bears a MAC, for who can write to
the database is not thereby who may give rights (docs/decisions/0052).
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.errors import KeyEndedError, KeyNotFoundError, StorageBusyError
from service.gallery.audit_log import record
from service.gallery.database import Database, new_version
from service.gallery.tables import api_key_versions, api_keys, galleries
from service.gallery.vault import Vault
from service.security.keys import ApiKey, Keyring, Rights, digest, mac, new_token

SECRET: Final = "api keys"  # noqa: S105 - its name
VERSION: Final = sa.select(api_key_versions.c.version)
_BUSY: Final = StorageBusyError("another key was being written")
log = logging.getLogger(__name__)


Listed = tuple[int, ApiKey]
"""The number of its row, and the key."""


@dataclass(frozen=True)
class _Read:
    ring: Keyring
    version: int | None
    file_version: int | None


class KeyStore:
    """Every method is one transaction; all block, but for :meth:`ring_at_once`. Safe to share between threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._read: _Read | None = None

    def ring_at_once(self) -> Keyring | None:
        """As :meth:`ring`, in microseconds, where nothing at all was written to the file since it was read."""
        read = self._read
        if read is None or read.file_version is None or read.file_version != self._database.file_version(wait=False):
            return None
        return read.ring

    def ring(self) -> Keyring:
        """All keys as they are now. Raises StorageError, MasterKeyError."""
        if (known := self.ring_at_once()) is not None:
            return known
        file_version, before = self._database.file_version(), self._read
        if before is not None:
            now = self._database.first(VERSION, {})
            if now is not None and now.version == before.version:
                self._read = _Read(before.ring, before.version, file_version)
                return before.ring
        with self._database.read() as connection:
            version = connection.execute(VERSION).scalar()
            secret = self._database.vault.secret(connection, SECRET)
            keys = [_key(row, secret) for row in connection.execute(sa.select(api_keys))]
        for key in keys:
            if key.altered:
                log.error("API key %s was altered in the database, and is refused: see 'kith gallery check'", key.id)
        ring = Keyring(secret, keys)
        self._read = _Read(ring, version, file_version)
        return ring

    def list_keys(self, ended: bool = True, after: int | None = None, most: int | None = None) -> list[Listed]:
        """The oldest first. ``ended``: also those that were revoked or have expired; ``after``: the row of the last
        one of the page before."""
        query = sa.select(api_keys).order_by(api_keys.c.pk).limit(most)
        if after is not None:
            query = query.where(api_keys.c.pk > after)
        if not ended:
            now = _now()
            query = query.where(
                ~api_keys.c.revoked,
                *(at.is_(None) | (at > now) for at in (api_keys.c.revoked_at, api_keys.c.expires_at)),
            )
        with self._database.read() as connection:
            secret = self._database.vault.secret(connection, SECRET)
            return [(row.pk, _key(row, secret)) for row in connection.execute(query)]

    def gallery_names(self) -> set[str]:
        """Of the galleries that there are: a key may be for others, too."""
        with self._database.read() as connection:
            return set(connection.execute(sa.select(galleries.c.name)).scalars())

    def key(self, key_id: str) -> ApiKey:
        """Raises KeyNotFoundError."""
        with self._database.read() as connection:
            return self._found(connection, key_id)

    def create(
        self,
        name: str,
        rights: Rights,
        expires_at: datetime | None = None,
        rate: float | None = None,
        burst: int | None = None,
    ) -> tuple[ApiKey, str]:
        """The key, and its token, which nobody can tell again."""
        with self._database.write(_BUSY) as connection:
            key, token = self._insert(connection, name, rights, expires_at, rate, burst)
            self._record(connection, "key_created", key)
        return key, token

    def revoke(self, key_id: str) -> ApiKey:
        """For good, whatever clocks say; one that is revoked stays as it is. Raises KeyNotFoundError."""
        with self._database.write(_BUSY) as connection:
            key = self._found(connection, key_id, lock=True)
            if not key.revoked or key.altered:
                at = _earliest(key.revoked_at, _now())
                _change(connection, replace(key, revoked=True, revoked_at=at), self._secret(connection))
                _draw_version(connection)
                self._record(connection, "key_revoked", key)
            return self._found(connection, key_id)

    def rotate(self, key_id: str, overlap: timedelta) -> tuple[ApiKey, str]:
        """Another key with the same rights, which lives as long; the old one works beside it for ``overlap``.

        Raises:
            KeyNotFoundError: there is no such key.
            KeyEndedError: it was revoked or altered, or has expired, or another took its place already: who lost that
                one's token revokes it.
        """
        with self._database.write(_BUSY) as connection:
            old, now = self._found(connection, key_id, lock=True), _now()
            if (state := old.state(now)) != "active":
                raise KeyEndedError(f"key {key_id} is {state}")
            if old.revoked_at is not None:
                ends = old.revoked_at.isoformat(" ", "minutes")
                raise KeyEndedError(f"key {key_id} was rotated already, and ends at {ends}")
            ended = replace(old, revoked=not overlap, revoked_at=now + overlap)
            _change(connection, ended, self._secret(connection))
            new, token = self._insert(connection, old.name, old.rights, old.next_expiry(now), old.rate, old.burst)
            self._record(connection, "key_rotated", old, new=new.id)
        return new, token

    def used(self, at: Mapping[str, datetime]) -> None:
        """Note when keys were used last, by their ids."""
        with self._database.write(_BUSY) as connection:
            for key_id, when in sorted(at.items()):  # as others do, or two might wait for each other
                earlier = api_keys.c.used_at.is_(None) | (api_keys.c.used_at < when)
                connection.execute(api_keys.update().where(api_keys.c.id == key_id, earlier).values(used_at=when))

    def _insert(
        self,
        connection: Connection,
        name: str,
        rights: Rights,
        expires_at: datetime | None,
        rate: float | None,
        burst: int | None,
    ) -> tuple[ApiKey, str]:
        key_id, token = new_token()
        secret = self._secret(connection)
        key = ApiKey(key_id, digest(token, secret), name, rights, rate, burst, _now(), expires_at)
        connection.execute(api_keys.insert().values(**_columns(key, secret)))
        _draw_version(connection)
        return self._found(connection, key_id), token

    def _found(self, connection: Connection, key_id: str, lock: bool = False) -> ApiKey:
        query = sa.select(api_keys).where(api_keys.c.id == key_id)
        row = connection.execute(query.with_for_update() if lock else query).first()
        if row is None:
            raise KeyNotFoundError(f"there is no key {key_id!r}")
        return _key(row, self._secret(connection))

    def _secret(self, connection: Connection) -> bytes:
        return self._database.vault.secret(connection, SECRET)

    def _record(self, connection: Connection, event: str, key: ApiKey, **details: str) -> None:
        galleries = None if key.rights.galleries is None else sorted(key.rights.galleries)
        expires = None if key.expires_at is None else key.expires_at.isoformat()
        about: dict[str, Any] = {"key": key.id, "scopes": sorted(key.rights.scopes), "galleries": galleries, **details}
        record(self._database.vault, connection, event, **about, expires_at=expires)


def altered_keys(connection: Connection, vault: Vault) -> list[ApiKey]:
    """Those whose rows somebody altered who had not the service's secret."""
    return [key for key in _all(connection, vault) if key.altered]


def ended_keys(connection: Connection, vault: Vault) -> list[ApiKey]:
    """All keys, before a backup takes their place, for :func:`end_again`."""
    return _all(connection, vault)


def end_again(connection: Connection, vault: Vault, before: Iterable[ApiKey]) -> None:
    """What was revoked or shortened since a backup stays so after it is restored. Keys that it lacks come back as
    revoked: their digests are of another secret perhaps, and without a row the service might stand open."""
    secret = vault.secret(connection, SECRET)  # the backup's
    here = {key.id: key for key in _all(connection, vault)}
    for key in before:
        now = here.get(key.id)
        if now is None:
            ended = replace(key, revoked=True, revoked_at=_earliest(key.revoked_at, _now()))
            connection.execute(api_keys.insert().values(**_columns(ended, secret)))
        elif not now.altered:  # whose rights are not to be made good
            ended = replace(
                now,
                expires_at=_earliest(key.expires_at, now.expires_at),
                revoked=key.revoked or now.revoked,
                revoked_at=_earliest(key.revoked_at, now.revoked_at),
            )
            _change(connection, ended, secret)
    connection.execute(api_key_versions.delete())
    connection.execute(api_key_versions.insert().values(pk=1, version=new_version()))


def _earliest(*times: datetime | None) -> datetime | None:
    return min((at for at in times if at is not None), default=None)


def _all(connection: Connection, vault: Vault) -> list[ApiKey]:
    secret = vault.secret(connection, SECRET)
    return [_key(row, secret) for row in connection.execute(sa.select(api_keys).order_by(api_keys.c.pk))]


def _change(connection: Connection, key: ApiKey, secret: bytes) -> None:
    connection.execute(api_keys.update().where(api_keys.c.id == key.id).values(**_columns(key, secret)))


def _draw_version(connection: Connection) -> None:
    connection.execute(api_key_versions.update().values(version=new_version()))


def _columns(key: ApiKey, secret: bytes) -> dict[str, Any]:
    rights = key.rights
    return {
        "id": key.id,
        "digest": key.digest,
        "name": key.name,
        "scopes": sorted(rights.scopes),
        "galleries": sa.null() if rights.galleries is None else sorted(rights.galleries),
        "rate": key.rate,
        "burst": key.burst,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "used_at": key.used_at,
        "revoked": key.revoked,
        "mac": mac(key, secret),
    }


def _key(row: sa.Row[Any], secret: bytes) -> ApiKey:
    times = row.created_at, row.expires_at, row.revoked_at, row.used_at
    try:
        galleries = None if row.galleries is None else frozenset(row.galleries)
        rights = Rights(frozenset(row.scopes), galleries)
        key = ApiKey(row.id, row.digest, row.name, rights, row.rate, row.burst, *times, row.revoked)
        holds = hmac.compare_digest(mac(key, secret).encode(), row.mac.encode())
    except (TypeError, ValueError, AttributeError):
        # Such a value nobody writes who has the secret. The other keys are as good as before.
        nothing = Rights(frozenset(), frozenset())
        return ApiKey(str(row.id), str(row.digest), str(row.name), nothing, None, None, *times, altered=True)
    return replace(key, altered=not holds)


def _now() -> datetime:
    return datetime.now(UTC)

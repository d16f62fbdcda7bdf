"""API keys: creation, rotation and revocation. The next request to any process rejects a revoked key.

All keys are cached with a version that every change replaces, and on SQLite with the file's version. Rows are never
deleted: a service without keys would be open. Each has a MAC: writing to the database is not enough to grant rights.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.fields import rfc3339
from service.core.errors import NotFoundError, RefusedError, StorageBusyError
from service.security.api_keys import ApiKey, Keyring, Rights, digest, mac, new_token
from service.storage.audit.log import note
from service.storage.db.engine import Database, new_version
from service.storage.db.key_vault import Vault
from service.storage.db.tables import api_key_versions, api_keys, galleries
from service.storage.repositories.gallery_rows import VISIBLE

SECRET: Final = "api keys"  # noqa: S105 - name of the secret
VERSION: Final = sa.select(api_key_versions.c.version)
_CONFLICT: Final = StorageBusyError("another API key was written at the same time")
log = logging.getLogger(__name__)


class KeyStore:
    """API keys in SQL. Every method is one transaction and blocks, except :meth:`cached_ring`. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cached: tuple[Keyring, int | None, int | None] | None = None
        """Keys, their version, and that of the database file that they were current at."""

    def cached_ring(self) -> Keyring | None:
        """Return the cached keys, in microseconds, if the database file did not change since they were read."""
        ring, _, file_version = self._cached or (None, None, None)
        return ring if file_version is not None and file_version == self._database.file_version() else None

    def ring(self) -> Keyring:
        """Return all keys in their latest version. Raises StorageError, MasterKeyError."""
        if (known := self.cached_ring()) is not None:
            return known
        file_version, before = self._database.file_version(), self._cached
        if before is not None:
            now = self._database.first(VERSION, {})
            if now is not None and now.version == before[1]:
                self._cached = *before[:2], file_version
                return before[0]
        with self._database.read() as connection:
            version = connection.execute(VERSION).scalar()
            secret = self._secret(connection)
            keys = all_keys(connection, self._database.vault)
        for key in keys:
            if key.altered:
                log.error("API key %s was altered in the database and is rejected. Revoke it.", key.id)
        ring = Keyring(secret, keys)
        self._cached = ring, version, file_version
        return ring

    def list_keys(
        self, ended: bool = True, after: int | None = None, limit: int | None = None
    ) -> list[tuple[int, ApiKey]]:
        """Return row keys and API keys, oldest first: ``limit`` after a row key. ``ended``: also ended ones."""
        query, now = sa.select(api_keys).where(api_keys.c.pk > (after or 0)).order_by(api_keys.c.pk), _now()
        with self._database.read() as connection:
            secret = self._secret(connection)
            found = [(row.pk, _key(row, secret)) for row in connection.execute(query)]
        return [one for one in found if ended or one[1].state(now) not in ("revoked", "expired")][:limit]

    def gallery_names(self) -> set[str]:
        """Return the names of all galleries. A key may also name galleries that do not exist."""
        with self._database.read() as connection:
            return set(connection.execute(sa.select(galleries.c.name).where(VISIBLE)).scalars())

    def key(self, key_id: str) -> ApiKey:
        """Raises key_not_found."""
        with self._database.read() as connection:
            return self._read_key(connection, key_id)

    def create(
        self,
        name: str,
        rights: Rights,
        expires_at: datetime | None = None,
    ) -> tuple[ApiKey, str]:
        """Create a key; return it with its token, which is not stored and cannot be shown again."""
        with self._database.write(_CONFLICT) as connection:
            new = ApiKey("", "", name, rights, _now(), expires_at)
            key, token = self._insert(connection, new)
            self._record(connection, "key_created", key)
        return key, token

    def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key for good, independently of clocks. A revoked key does not change. Raises key_not_found."""
        with self._database.write(_CONFLICT) as connection:
            key = self._read_key(connection, key_id, lock=True)
            if not key.revoked or key.altered:
                at = _earliest(key.revoked_at, _now())
                _change(connection, replace(key, revoked=True, revoked_at=at), self._secret(connection))
                _draw_version(connection)
                self._record(connection, "key_revoked", key)
            return self._read_key(connection, key_id)

    def rotate(self, key_id: str, overlap: timedelta) -> tuple[ApiKey, str]:
        """Create a key with the same rights and lifetime. The old one stays valid for ``overlap``.

        Raises key_not_found; key_ended: it is revoked, altered, expired, or already rotated.
        """
        with self._database.write(_CONFLICT) as connection:
            old, now = self._read_key(connection, key_id, lock=True), _now()
            if (state := old.state(now)) != "active":
                raise RefusedError("key_ended", f"key {key_id} is {state}")
            if old.revoked_at is not None:
                ends = rfc3339(old.revoked_at)
                raise RefusedError("key_ended", f"key {key_id} was already rotated and ends at {ends}")
            ended = replace(old, revoked=not overlap, revoked_at=now + overlap)
            _change(connection, ended, self._secret(connection))
            new = ApiKey("", "", old.name, old.rights, _now(), old.next_expiry(now))
            new, token = self._insert(connection, new)
            self._record(connection, "key_rotated", old, new=new.id)
        return new, token

    def record_usage(self, at: Mapping[str, datetime]) -> None:
        """Store the last use of keys by id."""
        with self._database.write(_CONFLICT) as connection:
            for key_id, when in sorted(at.items()):  # one lock order for all writers: no deadlock
                earlier = api_keys.c.used_at.is_(None) | (api_keys.c.used_at < when)
                connection.execute(api_keys.update().where(api_keys.c.id == key_id, earlier).values(used_at=when))

    def _insert(self, connection: Connection, key: ApiKey) -> tuple[ApiKey, str]:
        """Insert a key with a new id and token, and return both."""
        key_id, token = new_token()
        secret = self._secret(connection)
        named = replace(key, id=key_id, digest=digest(token, secret))
        connection.execute(api_keys.insert().values(**_columns(named, secret)))
        _draw_version(connection)
        return self._read_key(connection, key_id), token

    def _read_key(self, connection: Connection, key_id: str, lock: bool = False) -> ApiKey:
        query = sa.select(api_keys).where(api_keys.c.id == key_id)
        row = connection.execute(query.with_for_update() if lock else query).first()
        if row is None:
            raise NotFoundError("key", f"there is no key {key_id!r}")
        return _key(row, self._secret(connection))

    def _secret(self, connection: Connection) -> bytes:
        return self._database.vault.secret(connection, SECRET)

    def _record(self, connection: Connection, event: str, key: ApiKey, **details: str) -> None:
        galleries = None if key.rights.galleries is None else sorted(key.rights.galleries)
        expires = None if key.expires_at is None else rfc3339(key.expires_at)
        about: dict[str, Any] = {"key": key.id, "scopes": sorted(key.rights.scopes), "galleries": galleries, **details}
        note(self._database.vault, connection, event, **about, expires_at=expires)


def keep_restrictions(connection: Connection, vault: Vault, before: Iterable[ApiKey]) -> None:
    """Apply revocations and shorter lifetimes from before a restore to the restored keys.

    Keys that the backup lacks are inserted as revoked: a service without rows would be open.
    """
    secret = vault.secret(connection, SECRET)  # of the backup
    here = {key.id: key for key in all_keys(connection, vault)}
    for key in before:
        now = here.get(key.id)
        if now is None:
            ended = replace(key, revoked=True, revoked_at=_earliest(key.revoked_at, _now()))
            connection.execute(api_keys.insert().values(**_columns(ended, secret)))
        elif not now.altered:  # an altered key stays rejected
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


def all_keys(connection: Connection, vault: Vault) -> list[ApiKey]:
    """Return all keys, oldest first."""
    secret = vault.secret(connection, SECRET)
    return [_key(row, secret) for row in connection.execute(sa.select(api_keys).order_by(api_keys.c.pk))]


def _change(connection: Connection, key: ApiKey, secret: bytes) -> None:
    connection.execute(api_keys.update().where(api_keys.c.id == key.id).values(**_columns(key, secret)))


def _draw_version(connection: Connection) -> None:
    connection.execute(api_key_versions.update().values(version=new_version()))


def _columns(key: ApiKey, secret: bytes) -> dict[str, Any]:
    galleries = sa.null() if key.rights.galleries is None else sorted(key.rights.galleries)
    plain = {name: value for name, value in vars(key).items() if name not in {"rights", "altered"}}
    return plain | {"scopes": sorted(key.rights.scopes), "galleries": galleries, "mac": mac(key, secret)}


def _key(row: sa.Row[Any], secret: bytes) -> ApiKey:
    times = row.created_at, row.expires_at, row.revoked_at, row.used_at
    try:
        galleries = None if row.galleries is None else frozenset(row.galleries)
        rights = Rights(frozenset(row.scopes), galleries)
        key = ApiKey(row.id, row.digest, row.name, rights, *times, row.revoked)
        holds = hmac.compare_digest(mac(key, secret).encode(), row.mac.encode())
    except (TypeError, ValueError, AttributeError):
        # An invalid value, which the service never writes: reject this key, keep the others valid.
        nothing = Rights(frozenset(), frozenset())
        return ApiKey(str(row.id), str(row.digest), str(row.name), nothing, *times, altered=True)
    return replace(key, altered=not holds)


def _now() -> datetime:
    return datetime.now(UTC)

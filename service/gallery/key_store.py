"""API keys in SQL. A key that was revoked is refused by the next request to any process.

All keys are held in memory, as of a version of theirs, and on SQLite of the file (docs/decisions/0034): where nothing
was written, a request asks nobody; else it reads four numbers. Rows are never deleted, so that the last key that is
revoked does not leave the service open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.errors import KeyEndedError, KeyNotFoundError, StorageBusyError
from service.gallery.audit_log import record
from service.gallery.database import Database
from service.gallery.tables import api_keys, galleries
from service.security.keys import ApiKey, Keyring, Rights, digest, new_token

SECRET: Final = "api keys"  # noqa: S105 - its name
# Each thing that is done to keys changes one of the numbers; the times tell another database in this one's place.
VERSION: Final = cast(
    "sa.Select[Any]",
    sa.select(
        sa.func.count(),
        sa.func.count(api_keys.c.revoked_at),
        sa.func.max(api_keys.c.created_at),
        sa.func.max(api_keys.c.revoked_at),
    ).select_from(api_keys),
)
_BUSY: Final = StorageBusyError("another key was being written")


@dataclass(frozen=True)
class _Read:
    ring: Keyring
    version: tuple[Any, ...]
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
            if now is not None and tuple(now) == before.version:
                self._read = _Read(before.ring, before.version, file_version)
                return before.ring
        with self._database.read() as connection:
            version = tuple(connection.execute(VERSION).one())
            secret = self._database.vault.secret(connection, SECRET)
            ring = Keyring(secret, [_key(row) for row in connection.execute(sa.select(api_keys))])
        self._read = _Read(ring, version, file_version)
        return ring

    def list_keys(self) -> list[ApiKey]:
        """The oldest first."""
        with self._database.read() as connection:
            return [_key(row) for row in connection.execute(sa.select(api_keys).order_by(api_keys.c.pk))]

    def gallery_names(self) -> set[str]:
        """Of the galleries that there are: a key may be for others, too."""
        with self._database.read() as connection:
            return set(connection.execute(sa.select(galleries.c.name)).scalars())

    def key(self, key_id: str) -> ApiKey:
        """Raises KeyNotFoundError."""
        with self._database.read() as connection:
            return _found(connection, key_id)

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
        """For good; one that is revoked stays as it is. Raises KeyNotFoundError."""
        with self._database.write(_BUSY) as connection:
            key, now = _found(connection, key_id, lock=True), _now()
            if key.revoked_at is None or key.revoked_at > now:
                _update(connection, key_id, revoked_at=now)
                self._record(connection, "key_revoked", key)
            return _found(connection, key_id)

    def rotate(self, key_id: str, overlap: timedelta) -> tuple[ApiKey, str]:
        """Another key with the same rights, which lives as long; the old one works beside it for ``overlap``.

        Raises:
            KeyNotFoundError: there is no such key.
            KeyEndedError: it was revoked, or has expired, or another took its place already: who lost that one's token
                revokes it.
        """
        with self._database.write(_BUSY) as connection:
            old, now = _found(connection, key_id, lock=True), _now()
            if (state := old.state(now)) != "active":
                raise KeyEndedError(f"key {key_id} is {state}")
            if old.revoked_at is not None:
                ends = old.revoked_at.isoformat(" ", "minutes")
                raise KeyEndedError(f"key {key_id} was rotated already, and ends at {ends}")
            _update(connection, key_id, revoked_at=now + overlap)
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
        connection.execute(
            api_keys.insert().values(
                id=key_id,
                digest=digest(token, self._database.vault.secret(connection, SECRET)),
                name=name,
                scopes=sorted(rights.scopes),
                galleries=sa.null() if rights.galleries is None else sorted(rights.galleries),
                rate=rate,
                burst=burst,
                created_at=_now(),
                expires_at=expires_at,
            )
        )
        return _found(connection, key_id), token

    def _record(self, connection: Connection, event: str, key: ApiKey, **details: str) -> None:
        galleries = None if key.rights.galleries is None else sorted(key.rights.galleries)
        expires = None if key.expires_at is None else key.expires_at.isoformat()
        about: dict[str, Any] = {"key": key.id, "scopes": sorted(key.rights.scopes), "galleries": galleries, **details}
        record(self._database.vault, connection, event, **about, expires_at=expires)


def ended_keys(connection: Connection) -> list[dict[str, Any]]:
    """All keys, before a backup takes their place, for :func:`end_again`."""
    columns = [column for column in api_keys.c if column is not api_keys.c.pk]
    return [dict(row._mapping) for row in connection.execute(sa.select(*columns).order_by(api_keys.c.pk))]


def end_again(connection: Connection, before: Sequence[Mapping[str, Any]]) -> None:
    """What was revoked or shortened since a backup stays so after it is restored. Keys that it lacks come back as
    revoked: their digests are of another secret perhaps, and without a row the service might stand open."""
    here = {row.id: row for row in connection.execute(sa.select(api_keys))}
    for key in before:
        now = here.get(key["id"])
        if now is None:
            connection.execute(api_keys.insert().values({**key, "revoked_at": key["revoked_at"] or _now()}))
            continue
        ends = [at for at in (key["expires_at"], now.expires_at) if at is not None]
        revoked = now.revoked_at or key["revoked_at"]
        _update(connection, now.id, expires_at=min(ends, default=None), revoked_at=revoked)


def _found(connection: Connection, key_id: str, lock: bool = False) -> ApiKey:
    query = sa.select(api_keys).where(api_keys.c.id == key_id)
    row = connection.execute(query.with_for_update() if lock else query).first()
    if row is None:
        raise KeyNotFoundError(f"there is no key {key_id!r}")
    return _key(row)


def _update(connection: Connection, key_id: str, **values: datetime | None) -> None:
    connection.execute(api_keys.update().where(api_keys.c.id == key_id).values(**values))


def _key(row: sa.Row[Any]) -> ApiKey:
    galleries = None if row.galleries is None else frozenset(row.galleries)
    return ApiKey(
        row.id,
        row.digest,
        row.name,
        Rights(frozenset(row.scopes), galleries),
        row.rate,
        row.burst,
        row.created_at,
        row.expires_at,
        row.revoked_at,
        row.used_at,
    )


def _now() -> datetime:
    return datetime.now(UTC)

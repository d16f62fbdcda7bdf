"""Data keys of galleries and secrets of the service, stored wrapped by the master key.

All secrets are wrapped by one master key, and new keys use the same one. Rotation replaces it in one transaction
(service.storage.privacy.master_key_rotation).
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from cachetools import LRUCache
from sqlalchemy.engine import Connection

from service.core.errors import MasterKeyError
from service.security.master_keys import MasterKeys
from service.security.sealing import Seal, new_key
from service.storage.db.tables import data_keys, secrets

GALLERY: Final = "gallery"
"""Purpose that data keys are wrapped for. It does not name the gallery, because a restored one has another row key."""
SERVICE_SECRETS: Final = ("audit", "api keys", "webhooks")
"""Secrets of the service, which a new database receives."""
MAX_OPEN_SEALS: Final = 10_000


class Vault:
    """Cache of unwrapped keys, with LRU eviction of galleries' seals. Thread-safe."""

    def __init__(self, master: MasterKeys) -> None:
        self.master = master
        self._seals = LRUCache[int, tuple[bytes, Seal]](MAX_OPEN_SEALS)
        """Wrapped key and seal by gallery. A restored older database may use a gallery number for another key."""
        self._secrets: dict[str, tuple[bytes, bytes]] = {}
        """Wrapped and unwrapped secret by name."""
        self._lock = threading.Lock()

    def create(self, connection: Connection, gallery_pk: int) -> Seal:
        """Store a new gallery's data key within the transaction that creates the gallery. Raises MasterKeyError."""
        key = new_key()
        connection.execute(data_keys.insert().values(gallery_pk=gallery_pk, **self._wrapped(connection, key, GALLERY)))
        return Seal(key)

    def _wrapped(self, connection: Connection, key: bytes, purpose: str) -> dict[str, Any]:
        """Wrap a new key by the master key in use; the first configured one for a database without keys."""
        key_id = connection.execute(sa.select(secrets.c.master_key).order_by(secrets.c.name).limit(1)).scalar()
        wrapper = self.master.first() if key_id is None else self.master.of(key_id)
        return {"wrapped": wrapper.wrap(key, purpose), "master_key": wrapper.id, "created_at": datetime.now(UTC)}

    def seal(self, gallery_pk: int, wrapped: bytes | None, master_key: str | None) -> Seal:
        """Return the seal of a ``data_keys`` row, or of a missing row (None).

        The key is unwrapped at first use, which raises MasterKeyError if it cannot be.
        """
        if wrapped is None or master_key is None:
            return Seal(partial(_raise_missing, gallery_pk))
        with self._lock:
            cached = self._seals.get(gallery_pk)
            if cached is None or cached[0] != wrapped:
                cached = wrapped, Seal(partial(self.master.unwrap, wrapped, GALLERY, master_key))
                self._seals[gallery_pk] = cached
        return cached[1]

    def evict(self, gallery_pk: int) -> None:
        with self._lock:
            self._seals.pop(gallery_pk, None)

    def evict_deleted(self, connection: Connection) -> None:
        """Evict the seals of galleries that another process deleted."""
        with self._lock:
            cached = list(self._seals)
        query = sa.select(data_keys.c.gallery_pk).where(data_keys.c.gallery_pk.in_(cached))
        for gallery_pk in set(cached) - set(connection.execute(query).scalars()):
            self.evict(gallery_pk)

    def create_secret(self, connection: Connection, name: str) -> None:
        """Store a new secret of the service. Raises MasterKeyError."""
        connection.execute(secrets.insert().values(name=name, **self._wrapped(connection, new_key(), name)))

    def secret(self, connection: Connection, name: str) -> bytes:
        """Return the 32 bytes of a secret of the service. Raises MasterKeyError.

        The row is read each time, because a restore may have replaced the database.
        """
        return self.unwrap(connection.execute(SECRET, {"secret": name}).one())

    def unwrap(self, row: sa.Row[Any]) -> bytes:
        """Return the secret of a SECRETS row, and cache it. Raises MasterKeyError."""
        wrapped, cached = bytes(row.wrapped), self._secrets.get(row.name)
        if cached is None or cached[0] != wrapped:
            cached = wrapped, self.master.unwrap(wrapped, row.name, row.master_key)
            self._secrets[row.name] = cached
        return cached[1]


def _raise_missing(gallery_pk: int) -> bytes:
    raise MasterKeyError(f"the data key of gallery {gallery_pk} is missing")


# Built once: SQLAlchemy takes longer to build a statement than SQLite to run it.
SECRETS: Final[sa.Select[Any]] = sa.select(secrets.c.name, secrets.c.wrapped, secrets.c.master_key)
SECRET: Final = SECRETS.where(secrets.c.name == sa.bindparam("secret"))

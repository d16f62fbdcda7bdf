"""Data keys of galleries and secrets of the service, stored wrapped by the master key.

All secrets are wrapped by one master key, and new keys use the same one. Rotation replaces it in one transaction
(service.storage.privacy.master_key_rotation).
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import MasterKeyError
from service.security.master_keys import MasterKeys
from service.security.sealing import Seal, new_key
from service.storage.db.tables import data_keys, secrets

GALLERY: Final = "gallery"
"""Purpose that data keys are wrapped for. It does not name the gallery, because a restored one has another row key."""
SERVICE_SECRETS: Final = ("audit", "api keys", "webhooks")
"""Secrets of the service, which a new database receives."""


class Vault:
    """Keys of one database, which its master key unwraps at each use, in microseconds. Thread-safe."""

    def __init__(self, master: MasterKeys) -> None:
        self.master = master

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
        return Seal(partial(self.master.unwrap, wrapped, GALLERY, master_key))

    def create_secret(self, connection: Connection, name: str) -> None:
        """Store a new secret of the service. Raises MasterKeyError."""
        connection.execute(secrets.insert().values(name=name, **self._wrapped(connection, new_key(), name)))

    def secret(self, connection: Connection, name: str) -> bytes:
        """Return the 32 bytes of a secret of the service. Raises MasterKeyError.

        The row is read each time, because a restore may have replaced the database.
        """
        row = connection.execute(SECRET, {"secret": name}).one()
        return self.master.unwrap(bytes(row.wrapped), name, row.master_key)


def _raise_missing(gallery_pk: int) -> bytes:
    raise MasterKeyError(f"the data key of gallery {gallery_pk} is missing")


# Built once: SQLAlchemy takes longer to build a statement than SQLite to run it.
SECRET: Final = sa.select(secrets.c.wrapped, secrets.c.master_key).where(secrets.c.name == sa.bindparam("secret"))

"""The keys in the database: each gallery's own, and the service's secrets, wrapped by the master key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.gallery.tables import data_keys, secrets
from service.security.master import MasterKeys
from service.security.sealing import Seal, new_key

GALLERY: Final = "gallery"
"""What a data key is wrapped for. Not for which gallery: a restored one has another key in SQL."""
MOST_OPEN: Final = 10_000


class Vault:
    """Safe to share between threads. Seals are kept open, those asked for least lately go."""

    def __init__(self, master: MasterKeys) -> None:
        self.master = master
        self._open: OrderedDict[int, Seal] = OrderedDict()
        self._secrets: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    def create(self, connection: Connection, gallery_pk: int) -> Seal:
        """A new gallery's, within the transaction that makes the gallery. Raises MasterKeyError."""
        key, current = new_key(), self.master.current
        row = {"wrapped": current.wrap(key, GALLERY), "master_key": current.id, "created_at": datetime.now(UTC)}
        connection.execute(data_keys.insert().values(gallery_pk=gallery_pk, **row))
        return Seal(key)

    def seal(self, gallery_pk: int, wrapped: bytes, master_key: str) -> Seal:
        """Of a row of ``data_keys``. Raises MasterKeyError."""
        with self._lock:
            if gallery_pk in self._open:
                self._open.move_to_end(gallery_pk)
                return self._open[gallery_pk]
        opened = Seal(self.master.unwrap(wrapped, GALLERY, master_key))
        with self._lock:
            self._open[gallery_pk] = opened
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return opened

    def of(self, connection: Connection, gallery_pk: int) -> Seal:
        """Raises MasterKeyError; LookupError: there is no such gallery."""
        query = sa.select(data_keys.c.wrapped, data_keys.c.master_key).where(data_keys.c.gallery_pk == gallery_pk)
        row = connection.execute(query).first()
        if row is None:
            raise LookupError(f"gallery {gallery_pk} has no data key")
        return self.seal(gallery_pk, row.wrapped, row.master_key)

    def forget(self, gallery_pk: int) -> None:
        with self._lock:
            self._open.pop(gallery_pk, None)

    def check(self, connection: Connection) -> None:
        """Raises MasterKeyError: this is another master key than the database's."""
        for name in connection.execute(sa.select(secrets.c.name)).scalars().all():
            self.secret(connection, name)

    def create_secret(self, connection: Connection, name: str) -> None:
        """Raises MasterKeyError."""
        current = self.master.current
        row = {"wrapped": current.wrap(new_key(), name), "master_key": current.id, "created_at": datetime.now(UTC)}
        connection.execute(secrets.insert().values(name=name, **row))

    def secret(self, connection: Connection, name: str) -> bytes:
        """32 bytes for one purpose of the service, the same in every process. The row is read each time, for another
        database may have taken the place of this one. Raises MasterKeyError."""
        query = sa.select(secrets.c.wrapped, secrets.c.master_key).where(secrets.c.name == name)
        row = connection.execute(query).one()
        wrapped = bytes(row.wrapped)
        if wrapped not in self._secrets:
            self._secrets[wrapped] = self.master.unwrap(wrapped, name, row.master_key)
        return self._secrets[wrapped]

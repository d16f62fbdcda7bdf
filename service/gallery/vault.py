"""The keys in the database: each gallery's own, and the service's secrets, wrapped by the master key.

Which master key that is, of those at hand, the service's secrets say: they are all wrapped by it, and what is new is,
too. Another one takes its place in one transaction (service.gallery.rewrapping): there is no moment between the two.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.errors import MasterKeyError
from service.gallery.tables import data_keys, secrets
from service.security.master import MasterKeys, Wrapper
from service.security.sealing import Seal, new_key

GALLERY: Final = "gallery"
"""What a data key is wrapped for. Not for which gallery: a restored one has another key in SQL."""
MOST_OPEN: Final = 10_000


@dataclass(frozen=True)
class Fresh:
    """A key that nothing is sealed by yet."""

    key: bytes
    wrapped: bytes
    master_key: str


class Vault:
    """Safe to share between threads. Seals are kept open, those asked for least lately go."""

    def __init__(self, master: MasterKeys) -> None:
        self.master = master
        self._open: OrderedDict[int, tuple[bytes, Seal]] = OrderedDict()
        """With what each was opened from: where an older copy of the database was put back, a gallery's number may be
        given again, with another key."""
        self._secrets: dict[str, tuple[bytes, bytes]] = {}
        """By name, what they were unwrapped from and what they are."""
        self._lock = threading.Lock()

    def create(self, connection: Connection, gallery_pk: int, fresh: Fresh | None = None) -> Seal:
        """A new gallery's, within the transaction that makes the gallery. Raises MasterKeyError."""
        by = self.in_use(connection)
        if fresh is None or fresh.master_key != by.id:  # another one took its place since
            fresh = fresh_key(by)
        row = {"wrapped": fresh.wrapped, "master_key": fresh.master_key, "created_at": datetime.now(UTC)}
        connection.execute(data_keys.insert().values(gallery_pk=gallery_pk, **row))
        return Seal(fresh.key)

    def in_use(self, connection: Connection, held: bool = True) -> Wrapper:
        """The master key that wraps what is new; ``held`` until the end of a writing transaction: whoever would put
        another in its place waits. Only a database that has no key yet gets the first at hand. Raises MasterKeyError.
        """
        query = sa.select(secrets.c.master_key).order_by(secrets.c.name).limit(1)
        key_id = connection.execute(query.with_for_update(read=True) if held else query).scalar()
        return self.master.first() if key_id is None else self.master.of(key_id)

    def seal(self, gallery_pk: int, wrapped: bytes | None, master_key: str | None) -> Seal:
        """Of a row of ``data_keys``, None where it is missing. It is unwrapped at its first use, which raises
        MasterKeyError."""
        if wrapped is None or master_key is None:
            return Seal(partial(_missing, gallery_pk))
        with self._lock:
            if (known := self._open.get(gallery_pk)) is not None and known[0] == wrapped:
                self._open.move_to_end(gallery_pk)
                return known[1]
            seal = Seal(partial(self.master.unwrap, wrapped, GALLERY, master_key))
            self._open[gallery_pk] = wrapped, seal
            self._open.move_to_end(gallery_pk)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return seal

    def of(self, connection: Connection, gallery_pk: int) -> Seal:
        """Raises LookupError: there is no such gallery."""
        query = sa.select(data_keys.c.wrapped, data_keys.c.master_key).where(data_keys.c.gallery_pk == gallery_pk)
        row = connection.execute(query).first()
        if row is None:
            raise LookupError(f"gallery {gallery_pk} has no data key")
        return self.seal(gallery_pk, row.wrapped, row.master_key)

    def forget(self, gallery_pk: int) -> None:
        with self._lock:
            self._open.pop(gallery_pk, None)

    def forget_deleted(self, connection: Connection) -> None:
        """Let go of the keys of galleries that another process deleted."""
        with self._lock:
            known = list(self._open)
        query = sa.select(data_keys.c.gallery_pk).where(data_keys.c.gallery_pk.in_(known))
        for gallery_pk in set(known) - set(connection.execute(query).scalars()):
            self.forget(gallery_pk)

    def check(self, connection: Connection) -> None:
        """Raises MasterKeyError: this is another master key than the database's."""
        self.learn(self.wrapped_secrets(connection))

    def wrapped_secrets(self, connection: Connection) -> Sequence[sa.Row[Any, Any, Any]]:
        return connection.execute(SECRETS).all()

    def learn(self, rows: Iterable[sa.Row[Any, Any, Any]]) -> None:
        """Unwrap these secrets, where they are not known yet. Raises MasterKeyError."""
        for row in rows:
            self._unwrapped(row)

    def create_secret(self, connection: Connection, name: str) -> None:
        """Raises MasterKeyError."""
        made = fresh_key(self.in_use(connection), name)
        row = {"wrapped": made.wrapped, "master_key": made.master_key, "created_at": datetime.now(UTC)}
        connection.execute(secrets.insert().values(name=name, **row))

    def secret(self, connection: Connection, name: str) -> bytes:
        """32 bytes for one purpose of the service, the same in every process. The row is read each time, for another
        database may have taken the place of this one. Raises MasterKeyError."""
        return self._unwrapped(connection.execute(SECRET, {"secret": name}).one())

    def known_secret(self, name: str) -> bytes | None:
        """As it last was, perhaps of a database whose place another one has taken."""
        known = self._secrets.get(name)
        return None if known is None else known[1]

    def _unwrapped(self, row: sa.Row[Any, Any, Any]) -> bytes:
        wrapped, known = bytes(row.wrapped), self._secrets.get(row.name)
        if known is None or known[0] != wrapped:
            known = wrapped, self.master.unwrap(wrapped, row.name, row.master_key)
            self._secrets[row.name] = known
        return known[1]


def _missing(gallery_pk: int) -> bytes:
    raise MasterKeyError(f"the data key of gallery {gallery_pk} is gone")


def fresh_key(by: Wrapper, purpose: str = GALLERY) -> Fresh:
    """Of a gallery to be, it is made before the transaction that makes the gallery: whoever wraps it may take seconds,
    and writers wait for each other. Raises MasterKeyError."""
    key = new_key()
    return Fresh(key, by.wrap(key, purpose), by.id)


# Made once: SQLAlchemy takes longer to make a statement than SQLite to run it.
SECRETS: Final = sa.select(secrets.c.name, secrets.c.wrapped, secrets.c.master_key)
SECRET: Final = SECRETS.where(secrets.c.name == sa.bindparam("secret"))

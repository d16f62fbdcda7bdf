"""Answers of creations with an Idempotency-Key, stored in the transaction of the creation.

The row is inserted first: of concurrent repetitions, all but one wait for it, and then find the answer. An answer may
have the token of an API key. It is sealed under a key derived from the Idempotency-Key, which is not stored
(docs/decisions/0037).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from service.core.errors import IdempotencyConflictError, StorageBusyError
from service.security.sealing import Seal, derived
from service.storage.db.key_vault import Vault
from service.storage.db.row_sealing import ANSWER, DIGEST, REQUEST
from service.storage.db.tables import answers

SECRET: Final = "answers"  # noqa: S105 - name of the service's secret that seals answers


class AnsweredError(Exception):
    """Stored answer of the same request. It rolls the transaction back."""

    def __init__(self, answer: bytes) -> None:
        super().__init__("answered before")
        self.answer = answer


@dataclass(frozen=True)
class Once:
    """Creation that happens once, however often it is requested.

    ``name``: caller, method and path. ``key``: the Idempotency-Key. ``digest``: identifies the request's content.
    ``render``: returns the answer about what was created.
    """

    name: str
    key: str = field(repr=False)
    digest: str
    render: Callable[[Any], bytes]

    def has_begun(self, vault: Vault, connection: Connection) -> bool:
        """Return whether a request with this key began the creation before, whatever its content."""
        own = answers.c.lookup == self._lookup(vault.secret(connection, SECRET))
        return connection.execute(sa.select(answers.c.lookup).where(own)).first() is not None

    def begin(self, vault: Vault, connection: Connection) -> None:
        """Begin a creation. Raises AnsweredError, and IdempotencyConflictError if the key had another request."""
        secret = vault.secret(connection, SECRET)
        seal, lookup = Seal(secret), self._lookup(secret)
        digest = seal.pseudonym(DIGEST, self.digest)
        insert = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(answers)
        new = insert.values(lookup=lookup, digest=digest, created_at=datetime.now(UTC)).on_conflict_do_nothing()
        if connection.execute(new.returning(answers.c.lookup)).first() is not None:
            return
        row = connection.execute(sa.select(answers).where(answers.c.lookup == lookup)).first()
        if row is None:
            raise StorageBusyError("the first answer was deleted at the same time")
        if row.digest != digest:
            raise IdempotencyConflictError("the Idempotency-Key was used for another request")
        raise AnsweredError(self._seal(secret).open(row.sealed, ANSWER))

    def end(self, vault: Vault, connection: Connection, made: Any, gallery_pk: int | None = None) -> None:
        """Store the answer. It is deleted with the gallery."""
        secret = vault.secret(connection, SECRET)
        sealed = self._seal(secret).close(self.render(made), ANSWER)
        own = answers.c.lookup == self._lookup(secret)
        connection.execute(answers.update().where(own).values(sealed=sealed, gallery_pk=gallery_pk))

    def _lookup(self, secret: bytes) -> str:
        return Seal(secret).pseudonym(REQUEST, f"{self.name}\0{self.key}")

    def _seal(self, secret: bytes) -> Seal:
        return Seal(derived(secret, f"answer {self.name}\0{self.key}"))

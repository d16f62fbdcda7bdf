"""Hash chain of the audit: appends, prunes and walks the lines.

The hash of a line is an HMAC over the previous hash and the line, under a secret of the service. The head signs both
ends: the last line, and the last that was pruned. A writer to the database without the secret can change no line,
and cut off neither end.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.core.errors import StorageDamagedError
from service.storage.db.key_vault import Vault
from service.storage.db.tables import audit, audit_head

SECRET: Final = "audit"  # noqa: S105 - name of the service's secret
START: Final = {"pruned": 0, "before": "0" * 64, "number": 0, "hash": "0" * 64}
PRUNED_LINES: Final = 1000
LINES: Final = logging.getLogger("kith.audit")
"""Receives each line as JSON at level DEBUG."""
log = logging.getLogger(__name__)


class Fault(NamedTuple):
    """Violation of the chain, and the numbers of the affected lines."""

    kind: Literal["altered", "missing", "inserted", "head"]
    first: int
    last: int


@dataclass
class Report:
    """Result of a walk. ``pruned``: number of the last line that was deleted by age."""

    pruned: int
    lines: int = 0
    faults: list[Fault] = field(default_factory=list)


def begin(vault: Vault, connection: Connection) -> None:
    """Start the chain of a new database."""
    connection.execute(audit_head.insert().values(pk=1, **START, mac=_mac(vault.secret(connection, SECRET), **START)))


def append(vault: Vault, connection: Connection, lines: Sequence[dict[str, Any]]) -> None:
    """Append rows of ``audit``, and set their numbers, from 1, and hashes.

    Other writers wait from here until the transaction ends. Raises MasterKeyError, StorageDamagedError.
    """
    secret, sound, ends = _ends(vault, connection, LOCKED)
    for line in lines:
        line["number"] = ends["number"] + 1
        text = text_of(line)
        line["hash"] = _hash(secret, ends["hash"], text)
        ends |= {"number": line["number"], "hash": line["hash"]}
        LINES.debug("%s", text)
    connection.execute(INSERT, lines)
    _sign(connection, secret, sound, ends)


def prune(vault: Vault, connection: Connection, before: datetime) -> int:
    """Delete the oldest lines, at most PRUNED_LINES, up to the first of this time or later; return their number."""
    secret, sound, ends = _ends(vault, connection, LOCKED)
    past = list(takewhile(lambda row: row.at < before, connection.execute(OLDEST)))
    if past:
        connection.execute(audit.delete().where(audit.c.number <= past[-1].number))
        _sign(connection, secret, sound, ends | {"pruned": past[-1].number, "before": past[-1].hash})
    return len(past)


def walk(vault: Vault, connection: Connection) -> Report:
    """Verify all lines. Raises MasterKeyError, StorageDamagedError."""
    secret, sound, ends = _ends(vault, connection, HEAD)
    report, number, last = Report(ends["pruned"]), ends["pruned"], ends["before"]
    for row in connection.execute(RAW.execution_options(yield_per=2000)):
        report.lines += 1
        if row.number <= number:
            report.faults.append(Fault("inserted", row.number, row.number))
            continue
        if row.number > number + 1:
            report.faults.append(Fault("missing", number + 1, row.number - 1))
        elif _hash(secret, last, _read(row)) != row.hash:
            report.faults.append(Fault("altered", row.number, row.number))
        number, last = row.number, row.hash
    if number < ends["number"]:
        report.faults.append(Fault("missing", number + 1, ends["number"]))
    elif not sound or (number, last) != (ends["number"], ends["hash"]):
        report.faults.append(Fault("head", ends["number"], number))
    return report


def text_of(line: Mapping[str, Any]) -> str:
    """Return the text of a line that its hash covers."""
    at = (line["at"] if line["at"].tzinfo else line["at"].replace(tzinfo=UTC)).astimezone(UTC)
    document = {name: line[name] for name in SIGNED} | {"at": at.isoformat(timespec="microseconds")}
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _read(row: Any) -> str:
    """Return the text of a stored line; "" if it cannot be read."""
    try:
        read = {"at": datetime.fromisoformat(row.at), "details": json.loads(row.details)}
        return text_of({**row._mapping, **read})
    except (TypeError, ValueError):
        return ""


def _hash(secret: bytes, before: str, text: str) -> str:
    return hmac.digest(secret, f"{before}\n{text}".encode(), "sha256").hex()


def _mac(secret: bytes, **ends: Any) -> str:
    return _hash(secret, "ends", json.dumps(ends, sort_keys=True))


def _ends(vault: Vault, connection: Connection, query: sa.Select[Any]) -> tuple[bytes, bool, dict[str, Any]]:
    """Return the secret, whether the head is signed with it, and the ends of the chain."""
    head = connection.execute(query).first()
    if head is None:
        raise StorageDamagedError("the head of the audit's chain is missing")
    ends = {name: getattr(head, name) for name in START}
    secret = vault.secret(connection, SECRET)
    return secret, hmac.compare_digest(_mac(secret, **ends).encode(), str(head.mac).encode()), ends


def _sign(connection: Connection, secret: bytes, sound: bool, ends: dict[str, Any]) -> None:
    """Store the ends. An unsigned head stays unsigned: a new line must not certify forged ones."""
    if not sound:
        log.error("the audit was tampered with: its head is not signed by the service. Run 'kith audit verify'")
    connection.execute(SIGN, {**ends, "mac": _mac(secret, **ends) if sound else ""})


# Built once: building a statement takes longer in SQLAlchemy than SQLite takes to run it.
HEAD: Final = sa.select(audit_head)
LOCKED: Final = HEAD.with_for_update()
INSERT: Final = audit.insert()
SIGN: Final = audit_head.update()
OLDEST: Final = sa.select(audit.c.number, audit.c.hash, audit.c.at).order_by(audit.c.number).limit(PRUNED_LINES)
TEXTS: Final = ("event", "outcome", "actor", "request_id", "gallery", "subject")
SIGNED: Final = ("number", "at", *TEXTS, "details")
# As text: SQLite stores any text as a time, and as JSON.
AS_TEXT: Final = [sa.cast(column, sa.Text).label(column.name) for column in (audit.c.at, audit.c.details)]
RAW: Final = sa.select(audit.c.number, *audit.c[TEXTS], *AS_TEXT, audit.c.hash).order_by(audit.c.number)

"""Reads audit lines for display, and whole audits from a database, a copy of its file, or an export, to verify them.

Verification trusts no stored value: rows that cannot be parsed still count as lines. An export is a file of JSON lines,
verifiable without the service. It starts with the data that verification needs and ends with the heads of the chains,
so truncation is detected.
"""

from __future__ import annotations

import base64
import json
import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.fields import rfc3339
from service.core.errors import AuditFileError
from service.storage.audit.chain import Anchor, Head, Line, Stored
from service.storage.audit.log import PURPOSE
from service.storage.db.engine import Database, storage_error
from service.storage.db.tables import audit, audit_heads, galleries, secrets

FORMAT: Final = 1
BATCH_LINES: Final = 2000
TEXTS: Final = ("event", "outcome", "actor", "request_id", "gallery", "subject")
OPTIONAL: Final = TEXTS[3:]
COLUMNS: Final = ("number", "at", *TEXTS, "details")


@dataclass(frozen=True)
class AuditFilter:
    """Filter of audit lines; all given conditions apply. ``chain``: a gallery's key. ``subject``: a pseudonym."""

    chain: int | None = None
    gallery: str | None = None
    event: str | None = None
    actor: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    subject: str | None = None


@dataclass(frozen=True)
class ListedLine:
    """Audit line with its primary key and hash."""

    pk: int
    of_gallery: bool
    line: Line
    hash: str


def listed_lines(database: Database, chosen: AuditFilter, before: int | None, limit: int) -> list[ListedLine]:
    """Return the latest lines first. ``before``: only lines with a smaller primary key. Raises StorageError."""
    query = sa.select(audit).where(*_conditions(chosen)).order_by(audit.c.pk.desc()).limit(limit)
    if before is not None:
        query = query.where(audit.c.pk < before)
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [
        ListedLine(row.pk, row.gallery_pk is not None, Line(*(getattr(row, name) for name in COLUMNS)), row.hash)
        for row in rows
    ]


def _conditions(chosen: AuditFilter) -> Iterator[sa.ColumnElement[bool]]:
    if chosen.chain is not None:
        yield audit.c.gallery_pk == chosen.chain
    for name in ("gallery", "event", "actor"):
        if (wanted := getattr(chosen, name)) is not None:
            yield audit.c[name] == wanted
    if chosen.since is not None:
        yield audit.c.at >= chosen.since
    if chosen.until is not None:
        yield audit.c.at < chosen.until
    if chosen.subject is not None:
        # A search that found several subjects lists them in its details.
        among = sa.cast(audit.c.details, sa.Text).contains(chosen.subject, autoescape=True)
        yield (audit.c.subject == chosen.subject) | among


@dataclass(frozen=True)
class WrappedSecret:
    """Wrapped secret of the heads' MACs, and the id of the master key that unwraps it."""

    key: bytes
    master_key: str


@dataclass(frozen=True)
class Trail:
    """Snapshot of an audit. ``galleries``: names by key; None if unknown."""

    lines: Iterator[Stored]
    heads: Sequence[Head]
    secret: WrappedSecret | None
    galleries: Mapping[int, str] | None


@contextmanager
def trail_of(url: str) -> Iterator[Trail]:
    """Open the audit of a database, which may be read-only, as one snapshot for the duration of the block.

    Raises:
      AuditFileError: not a Kith database, or it has no audit.
      StorageError: the database cannot be read.
    """
    engine = _reader(sa.make_url(url))
    try:
        with engine.connect() as connection, connection.begin():
            if not all(sa.inspect(connection).has_table(table.name) for table in (audit, audit_heads, secrets)):
                raise AuditFileError("the database holds no audit: it is not a Kith database, or of an earlier version")
            yield Trail(_lines(connection), _heads(connection), _secret(connection), _galleries(connection))
    except sa.exc.SQLAlchemyError as error:
        raise storage_error("cannot read the audit", error) from error
    finally:
        engine.dispose()


def _reader(url: sa.URL) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        driver = url.set(drivername="postgresql+psycopg")
        return sa.create_engine(driver, isolation_level="REPEATABLE READ", poolclass=sa.pool.NullPool)
    path = Path(url.database or "")
    if not path.is_file():
        raise AuditFileError(f"{path} is not a file")
    # Without a WAL file the copy is opened as immutable, so that SQLite creates no files beside it.
    alone = "" if Path(f"{path}-wal").exists() else "&immutable=1"
    engine = sa.create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{alone}", uri=True, isolation_level=None),
        poolclass=sa.pool.NullPool,
    )
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def _lines(connection: Connection) -> Iterator[Stored]:
    raw: dict[str, sa.ColumnElement[Any]] = {"details": sa.cast(audit.c.details, sa.Text)}
    if connection.dialect.name == "sqlite":
        raw["at"] = sa.type_coerce(audit.c.at, sa.Text)  # a tampered value may be any text
    columns = [raw.get(name, audit.c[name]).label(name) for name in COLUMNS]
    query = sa.select(audit.c.chain, audit.c.hash, *columns).order_by(audit.c.chain, audit.c.number)
    for rows in connection.execute(query.execution_options(yield_per=BATCH_LINES)).partitions():
        for row in rows:
            yield _stored(row._asdict(), _time(row.at), row.details)


def _stored(row: Mapping[str, Any], at: datetime | None, details: str) -> Stored:
    """Parse a stored row; an invalid one has no ``line``. ``details``: JSON text."""
    try:
        document = json.loads(details)
    except (TypeError, ValueError):
        document = None
    chain, number = (value if isinstance(value, int) else -1 for value in (row["chain"], row["number"]))
    said = [row[name] for name in TEXTS]
    sound = all(
        isinstance(text, str) or (text is None and name in OPTIONAL) for name, text in zip(TEXTS, said, strict=True)
    )
    if at is None or not isinstance(document, dict) or not sound:
        return Stored(chain, number, None, str(row["hash"]))
    event, outcome, actor, request_id, gallery, subject = said
    line = Line(number, at, event, outcome, actor, request_id, gallery, subject, document)
    return Stored(chain, number, line, str(row["hash"]))


def _time(value: Any) -> datetime | None:
    try:
        at = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _heads(connection: Connection) -> list[Head]:
    return [Head(*row) for row in connection.execute(sa.select(*audit_heads.c["chain", "number", "hash", "mac"]))]


def _secret(connection: Connection) -> WrappedSecret | None:
    query = sa.select(secrets.c.wrapped, secrets.c.master_key).where(secrets.c.name == PURPOSE)
    row = connection.execute(query).first()
    return None if row is None else WrappedSecret(bytes(row.wrapped), row.master_key)


def _galleries(connection: Connection) -> dict[int, str]:
    return {row.pk: row.name for row in connection.execute(sa.select(galleries.c.pk, galleries.c.name))}


def write_trail(trail: Trail, to: IO[bytes]) -> int:
    """Write an export and return the number of lines. Unreadable lines are marked as such."""
    secret = trail.secret
    wrapped = None if secret is None else {"wrapped": base64.b64encode(secret.key).decode(), "key": secret.master_key}
    named = None if trail.galleries is None else {str(key): name for key, name in trail.galleries.items()}
    header = {"kith": "audit", "format": FORMAT, "at": rfc3339(datetime.now(UTC))}
    _write(to, {**header, "secret": wrapped, "galleries": named})
    count = 0
    for stored in trail.lines:
        _write(to, {"chain": stored.chain, "number": stored.number, "hash": stored.hash, **_fields(stored)})
        count += 1
    _write(to, {"heads": [asdict(head) for head in trail.heads]})
    return count


def _fields(stored: Stored) -> dict[str, Any]:
    line = stored.line
    return {"unreadable": True} if line is None else {**vars(line), "at": rfc3339(line.at)}


def _write(to: IO[bytes], document: dict[str, Any]) -> None:
    to.write(json.dumps(document, separators=(",", ":")).encode() + b"\n")


@contextmanager
def trail_in(path: Path) -> Iterator[Trail]:
    """Open an export. Raises AuditFileError if the file is not an export or is truncated."""
    with path.open("rb") as file:
        header = _document(path, file.readline())
        if header.get("kith") != "audit" or header.get("format") != FORMAT:
            raise AuditFileError(f"{path} is not an audit export of a version that this program reads")
        try:
            secret, named = header["secret"], header["galleries"]
            wrapped = None if secret is None else WrappedSecret(base64.b64decode(secret["wrapped"]), str(secret["key"]))
            galleries = None if named is None else {int(key): str(name) for key, name in named.items()}
            (last_line,) = deque(file, maxlen=1)
            heads = [Head(**head) for head in _document(path, last_line)["heads"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AuditFileError(f"{path} is truncated, or its header was altered") from error
        file.seek(0)
        file.readline()
        yield Trail(_exported_lines(path, file), heads, wrapped, galleries)


def _exported_lines(path: Path, file: IO[bytes]) -> Iterator[Stored]:
    for text in file:
        document = _document(path, text)
        if "heads" in document:
            return
        try:
            at = None if "unreadable" in document else datetime.fromisoformat(document["at"])
            yield _stored({**dict.fromkeys(TEXTS), **document}, at, json.dumps(document.get("details")))
        except (KeyError, TypeError, ValueError):
            yield Stored(int(document.get("chain", -1)), int(document.get("number", -1)), None, "")


def _document(path: Path, text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise AuditFileError(f"{path} holds a line that is not JSON") from error
    if not isinstance(document, dict):
        raise AuditFileError(f"{path} holds a line that is not a JSON object")
    return document


def anchor_lines(ends: Iterable[Anchor], at: datetime) -> list[str]:
    """Return anchors as JSON lines, to append to a file outside the service's control."""
    return [json.dumps({"at": rfc3339(at), **asdict(end)}) for end in ends]


def read_anchors(path: Path) -> list[Anchor]:
    """Raises AuditFileError."""
    try:
        documents = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        return [Anchor(str(d["chain"]), int(d["number"]), str(d["hash"]), d.get("gallery")) for d in documents]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AuditFileError(f"{path} holds no valid anchors; write them with 'kith audit head': {error}") from error

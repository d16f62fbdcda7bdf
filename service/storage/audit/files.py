"""Audit exports and anchor files in JSON lines, verifiable without the service.

An export starts with the data that verification needs and ends with the heads of the chains, so truncation is detected.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from service.core.errors import AuditFileError
from service.storage.audit.reader import Trail, WrappedSecret, stored_line
from service.storage.audit.verifier import Anchor, Head, Stored

FORMAT: Final = 1


def write_trail(trail: Trail, to: IO[bytes]) -> int:
    """Write an export and return the number of lines. Unreadable lines are marked as such."""
    secret = trail.secret
    wrapped = None if secret is None else {"wrapped": base64.b64encode(secret.key).decode(), "key": secret.master_key}
    named = None if trail.galleries is None else {str(key): name for key, name in trail.galleries.items()}
    header = {"kith": "audit", "format": FORMAT, "at": datetime.now(UTC).isoformat()}
    _write(to, {**header, "secret": wrapped, "galleries": named})
    count = 0
    for stored in trail.lines:
        _write(to, {"chain": stored.chain, "number": stored.number, "hash": stored.hash, **_fields(stored)})
        count += 1
    _write(to, {"heads": [asdict(head) for head in trail.heads]})
    return count


def _fields(stored: Stored) -> dict[str, Any]:
    line = stored.line
    return {"unreadable": True} if line is None else {**vars(line), "at": line.at.isoformat(timespec="microseconds")}


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
            heads = [Head(**head) for head in _document(path, _last_line(file))["heads"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AuditFileError(f"{path} is truncated, or its header was altered") from error
        file.seek(0)
        file.readline()
        yield Trail(_lines(path, file), heads, wrapped, galleries)


def _lines(path: Path, file: IO[bytes]) -> Iterator[Stored]:
    for text in file:
        document = _document(path, text)
        if "heads" in document:
            return
        try:
            at = None if "unreadable" in document else datetime.fromisoformat(document["at"])
            row = {"event": None, "outcome": None, "actor": None, "request_id": None, "gallery": None, "subject": None}
            yield stored_line({**row, **document}, at, json.dumps(document.get("details")))
        except (KeyError, TypeError, ValueError):
            yield Stored(int(document.get("chain", -1)), int(document.get("number", -1)), None, "")


def _last_line(file: IO[bytes]) -> bytes:
    size = file.seek(0, 2)
    length = 4096
    while True:
        start = max(0, size - length)
        file.seek(start)
        lines = file.read().rstrip(b"\n").split(b"\n")
        if len(lines) > 1 or not start:
            return lines[-1]
        length *= 2


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
    return [json.dumps({"at": at.isoformat(timespec="seconds"), **asdict(end)}) for end in ends]


def read_anchors(path: Path) -> list[Anchor]:
    """Raises AuditFileError."""
    try:
        documents = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        return [Anchor(str(d["chain"]), int(d["number"]), str(d["hash"]), d.get("gallery")) for d in documents]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AuditFileError(f"{path} holds no valid anchors; write them with 'kith audit head': {error}") from error

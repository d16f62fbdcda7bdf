"""Examining an audit without the service: of the database, of a copy of it, or of an export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from service.audit_files import trail_in
from service.errors import AuditFileError, MasterKeyError
from service.gallery.audit_log import PURPOSE
from service.gallery.audit_reading import Trail, trail_of
from service.opening import master_keys_at_hand
from service.security.trail import SERVICE, Anchor, Fault, Report, examine
from service.settings import load_settings

SQLITE: Final = b"SQLite format 3\x00"


@contextmanager
def opened_trail(source: Path | None) -> Iterator[Trail]:
    """Of an export, of a copy of SQLite's file, or of the settings' database. Raises AuditFileError, StorageError."""
    if source is None:
        with trail_of(load_settings().sql_url) as trail:
            yield trail
        return
    try:
        with source.open("rb") as file:
            is_database = file.read(len(SQLITE)) == SQLITE
    except OSError as error:
        raise AuditFileError(f"{source} cannot be read: {error.strerror}") from error
    with trail_of(f"sqlite:///{source.absolute()}") if is_database else trail_in(source) as trail:
        yield trail


def examined(source: Path | None, anchors: list[Anchor]) -> Report:
    """What is wrong with every chain. Raises as :func:`opened_trail`."""
    with opened_trail(source) as trail:
        secret, fault = _secret(trail)
        report = examine(trail.lines, trail.heads, secret, trail.galleries, anchors)
    if fault is not None:
        report.faults.insert(0, Fault("mac", SERVICE, None, None, None, fault))
    return report


def _secret(trail: Trail) -> tuple[bytes | None, str | None]:
    """Of the heads' MACs, if a master key is at hand; and what is wrong if one is, and does not lead to it: whoever
    wrote the lines anew would have left the secret out, or another one in its place."""
    keys, wrapped = master_keys_at_hand(load_settings()), trail.secret
    if keys is None:
        return None, None
    if wrapped is None:
        # Nothing was ever signed where nothing was ever written.
        return None, "the secret that heads are signed with is missing" if trail.heads else None
    try:
        return keys.unwrap(wrapped.key, PURPOSE, wrapped.master_key), None
    except MasterKeyError as error:
        return None, f"the master key at hand does not open the secret that heads are signed with: {error}"

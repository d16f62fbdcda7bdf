"""Revisions: names of stored states. A writer that names the state it has read loses no other writer's change."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Final

from service.core.errors import PreconditionFailedError

ANY: Final = "*"
"""Stands for every revision of what exists."""
DIGITS: Final = 32


def revision_of(state: bytes) -> str:
    """Return the name of a state, as 32 hexadecimal digits."""
    return hashlib.sha256(state).hexdigest()[:DIGITS]


def require_revision(expected: Collection[str] | None, revision: str | None) -> None:
    """Raises PreconditionFailedError: the state is not an expected one.

    ``expected``: revisions or ANY; None: no condition. ``revision``: None for what does not exist.
    """
    if expected is None or (revision is not None and (ANY in expected or revision in expected)):
        return
    detail = "it does not exist" if revision is None else "it was changed since it was read"
    raise PreconditionFailedError(f"If-Match: {detail}")

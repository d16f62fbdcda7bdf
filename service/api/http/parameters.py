"""Path and query parameters that several routes share, and pagination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, TypeVar

from fastapi import Header, Path, Query

from kith.wire.fields import GalleryName, SubjectId
from kith.wire.risk import Probability
from service.core.errors import InvalidRequestError
from service.security.sealing import Seal, SealBrokenError
from service.storage.db import row_sealing
from service.storage.db.row_sealing import seal_cursor

SEALED_CURSOR: Final = "^[0-9a-f]{58,160}$"
WITHOUT_NUL: Final = r"^[^\x00]*$"
"""PostgreSQL cannot store NUL in text."""
Row = TypeVar("Row")
GalleryPath = Annotated[GalleryName, Path()]
SubjectPath = Annotated[SubjectId, Path()]
PageLimit = Annotated[int, Query(ge=1, le=1000)]
NameCursor = Annotated[str | None, Query(max_length=128, pattern=WITHOUT_NUL, description="'next' of the page before.")]
Targets = Annotated[list[Probability], Query(max_length=20, description="FPIR targets; repeatable.")]
Cursor = Annotated[str | None, Query(pattern=SEALED_CURSOR, description="'next' of the page before.")]


def open_cursor(seal: Seal, cursor: str | None) -> int | None:
    """Return the row number after which a page begins. Raises InvalidRequestError: the cursor is of another list."""
    numbers = open_cursor_numbers(seal, cursor, 1)
    return None if numbers is None else numbers[0]


def open_cursor_numbers(seal: Seal, cursor: str | None, count: int) -> tuple[int, ...] | None:
    """Return the sort key of ``count`` numbers after which a page begins. Raises as :func:`open_cursor`."""
    if cursor is None:
        return None
    invalid = InvalidRequestError("cursor: it is not 'next' of a page of this list")
    try:
        numbers = row_sealing.open_cursor(seal, cursor)
    except (ValueError, SealBrokenError) as error:
        raise invalid from error
    if len(numbers) != count:
        raise invalid
    return numbers


def paginate(
    rows: Sequence[Row], limit: int, seal: Seal, number_of: Callable[[Row], int]
) -> tuple[Sequence[Row], str | None]:
    """Return a page and the cursor of the next one, from up to ``limit + 1`` rows."""
    page = rows[:limit]
    return page, seal_cursor(seal, number_of(page[-1])) if len(rows) > limit else None


IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=255, description="A repeated request gets the first response."
    ),
]

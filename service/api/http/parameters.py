"""Path and query parameters that several routes share, and pagination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, TypeVar

from fastapi import Header, Path, Query
from pydantic import BaseModel

from kith.wire.fields import GalleryName, Page, SubjectId
from kith.wire.risk import Probability
from service.core.actor import Threads
from service.core.errors import InvalidRequestError
from service.security.sealing import Seal, SealBrokenError
from service.storage.db import row_sealing
from service.storage.db.row_sealing import seal_cursor

SEALED_CURSOR: Final = "^[0-9a-f]{58,160}$"
WITHOUT_NUL: Final = r"^[^\x00]*$"
"""PostgreSQL cannot store NUL in text."""
Row = TypeVar("Row")
List = TypeVar("List", bound=Page[Any])
GalleryPath = Annotated[GalleryName, Path()]
SubjectPath = Annotated[SubjectId, Path()]
PageLimit = Annotated[int, Query(ge=1, le=1000)]
NameCursor = Annotated[str | None, Query(max_length=128, pattern=WITHOUT_NUL, description="'next' of the page before.")]
Targets = Annotated[list[Probability], Query(max_length=20, description="FPIR targets; repeatable.")]
Cursor = Annotated[str | None, Query(pattern=SEALED_CURSOR, description="'next' of the page before.")]


def open_cursor_numbers(seal: Seal, cursor: str | None, count: int, name: str = "cursor") -> tuple[int, ...] | None:
    """Return the sort key of ``count`` numbers after which a page begins.

    Raises InvalidRequestError: the cursor is of another list.
    """
    if cursor is None:
        return None
    invalid = InvalidRequestError(f"{name}: it is not a position in this list")
    try:
        numbers = row_sealing.open_cursor(seal, cursor)
    except (ValueError, SealBrokenError) as error:
        raise invalid from error
    if len(numbers) != count:
        raise invalid
    return numbers


class PageQuery(BaseModel):
    """The page that a request asks for."""

    cursor: Cursor = None
    limit: PageLimit = 100

    def after(self, seal: Seal) -> int | None:
        """Return the row number after which the page begins. Raises InvalidRequestError: the cursor is of another
        list."""
        numbers = open_cursor_numbers(seal, self.cursor, 1)
        return None if numbers is None else numbers[0]

    async def read(
        self,
        model: type[List],
        threads: Threads,
        seal: Seal,
        read: Callable[[int | None, int], Sequence[Row]],
        item_of: Callable[[Row], object] = lambda row: row,
        number_of: Callable[[Row], int] = attrgetter("pk"),
    ) -> List:
        """Return the page. ``read`` returns at most so many rows after a row number, and blocks. Raises as
        :meth:`after`."""
        rows = await threads.run(read, self.after(seal), self.limit + 1)
        page = rows[: self.limit]
        more = seal_cursor(seal, number_of(page[-1])) if len(rows) > self.limit else None
        return model(data=[item_of(row) for row in page], next=more)


PageDep = Annotated[PageQuery, Query()]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=255, description="A repeated request gets the first response."
    ),
]

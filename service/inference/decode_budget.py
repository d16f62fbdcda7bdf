"""Limits of the photos that are decoded at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.core.deadlines import FairSemaphore
from service.core.errors import DeadlineExceededError, OverloadedError


class Share:
    """Memory of one photo, in bytes."""

    def __init__(self, memory: FairSemaphore, size: int) -> None:
        self._memory = memory
        self.size = size

    def shrink(self, size: int) -> None:
        """Return the memory above ``size`` bytes to the budget."""
        if size < self.size:
            self._memory.release(self.size - size)
            self.size = size


class DecodeBudget:
    """Number and memory of photos that are decoded at once.

    Args:
        max_photos: photos of requests.
        max_bytes: memory of the photos of requests and jobs.
    """

    def __init__(self, max_photos: int, max_bytes: int) -> None:
        self.places = FairSemaphore(max_photos)
        self._memory = FairSemaphore(max_bytes)
        self._max_bytes = max_bytes

    @asynccontextmanager
    async def share(self, size: int) -> AsyncIterator[Share]:
        """Reserve ``size`` bytes within the block, in order of arrival. A photo that needs more than all gets all.

        A holder must not reserve another share, because two of them could wait for each other.

        Raises:
            OverloadedError: the deadline of the request ends first.
            ClientGoneError: the client disconnects first.
        """
        share = Share(self._memory, min(size, self._max_bytes))
        try:
            await self._memory.acquire(share.size)
        except DeadlineExceededError as error:
            raise OverloadedError(
                f"other photos used the {self._max_bytes} bytes for decoding photos until the deadline"
            ) from error
        try:
            yield share
        finally:
            self._memory.release(share.size)

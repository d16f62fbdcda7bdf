"""Batches across requests: items wait while the device works, and leave together when it is free.

No timer: an idle device takes a lone item at once, a busy one finds a full batch when it returns. Background work fills
what requests leave free of a batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

from service.errors import OverloadedError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Run ``function`` on batches of at most ``max_batch`` items, one batch at a time, in a thread of its own.

    ``function`` takes a list and returns one result per item, in order. If it raises, its items are tried again one
    by one, so that one bad item fails alone. Use as an async context manager; leaving it answers what was accepted.
    """

    def __init__(
        self, name: str, function: Callable[[list[Item]], Sequence[Result]], max_batch: int, max_queue: int
    ) -> None:
        self._function = function
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._behind: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._wake.set()
        if self._worker is not None:
            await self._worker
        self._thread.shutdown()

    async def submit(self, items: Sequence[Item], background: bool = False) -> list[Result]:
        """Return the results of ``items``, in order; ``background``: after all that is asked for otherwise.

        Raises:
            OverloadedError: at once, if the queue cannot take them all; none is then queued. Background work, which
                bounds itself, is only refused when closing.
        """
        full = self._waiting and len(self._waiting) + len(items) > self._max_queue
        if self._closing or (full and not background):
            raise OverloadedError(f"{len(self._waiting)} items are waiting")
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in items]
        (self._behind if background else self._waiting).extend(zip(items, futures, strict=True))
        self._wake.set()
        try:
            return list(await asyncio.gather(*futures))
        finally:
            # A cancelled or failed request's other items need not be computed.
            for future in futures:
                future.cancel()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._waiting and not self._behind:
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            batch: list[tuple[Item, asyncio.Future[Result]]] = []
            while (queue := self._waiting or self._behind) and len(batch) < self._max_batch:
                item, future = queue.popleft()
                if not future.done():
                    batch.append((item, future))
            if batch:
                outcomes = await loop.run_in_executor(self._thread, self._run, [item for item, _ in batch])
                for (_, future), outcome in zip(batch, outcomes, strict=True):
                    if future.done():
                        continue
                    if isinstance(outcome, Exception):
                        future.set_exception(outcome)
                    else:
                        future.set_result(outcome)

    def _run(self, items: list[Item]) -> list[Result | Exception]:
        try:
            return list(self._function(items))
        except Exception as error:
            if len(items) == 1:
                return [error]
            return [self._run([item])[0] for item in items]

"""The one pool of threads for the blocking work of requests: decoding, database, searches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple

from service.core.actor import run_in_thread

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class RequestThreads:
    """Pool of ``count`` threads; use as a context manager. Leaving it waits for running calls."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="blocking")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run a blocking function in a thread, with the current actor and context."""
        return await run_in_thread(self._pool, function, *arguments)

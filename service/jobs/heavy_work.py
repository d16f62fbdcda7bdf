"""Computations over whole galleries, outside of the threads of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextvars import copy_context
from typing import Any, Final, TypeVar

from service.core.errors import OverloadedError
from service.core.single_flight import run_in_daemon
from service.index.faiss_structures import lower_thread_priority

MAX_WAITING: Final = 16
"""Maximum number of computations that run or wait."""
Result = TypeVar("Result")


class HeavyWork:
    """Runs one computation at a time in a thread of low priority. For one event loop.

    Such a computation takes seconds to a minute. In the threads that decode photos, a few of them would stop all
    requests. The thread is a daemon, so that the process can exit meanwhile.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting: dict[Hashable, asyncio.Future[Any]] = {}
        self._count = 0

    async def run(self, key: Hashable, function: Callable[[], Result]) -> Result:
        """Return the result of ``function``, from a run that began after this call.

        Callers with an equal ``key`` share the run that waits for its turn (single-flight). It has the context of its
        first caller, and goes on if callers leave. Raises OverloadedError if MAX_WAITING run or wait.
        """
        run: asyncio.Future[Result] | None = self._waiting.get(key)
        if run is None:
            if self._count >= MAX_WAITING:
                raise OverloadedError(f"{MAX_WAITING} computations over whole galleries run or wait")
            self._count += 1
            run = self._waiting[key] = asyncio.ensure_future(self._in_turn(key, function))
            run.add_done_callback(self._end)
        return await asyncio.shield(run)

    def _end(self, done: asyncio.Future[Any]) -> None:
        self._count -= 1
        if not done.cancelled():
            done.exception()  # mark as retrieved: perhaps all callers have left

    async def _in_turn(self, key: Hashable, function: Callable[[], Result]) -> Result:
        context = copy_context()

        def run() -> Result:
            lower_thread_priority()
            return context.run(function)

        async with self._turn:
            del self._waiting[key]
            return await asyncio.wrap_future(run_in_daemon("heavy", run))

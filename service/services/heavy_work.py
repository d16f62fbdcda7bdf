"""Computations over whole galleries, outside of the threads of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextvars import copy_context
from typing import Any, Final, TypeVar

from service.core.errors import OverloadedError
from service.core.single_flight import SingleFlight
from service.index.replicas import lower_thread_priority

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
        self._runs: dict[Hashable, asyncio.Future[Any]] = {}

    async def run(self, key: Hashable, function: Callable[[], Result]) -> Result:
        """Return the result of ``function``. Concurrent callers with an equal ``key`` share one run (single-flight).

        The run has the context of its first caller, and goes on if callers leave.

        Raises:
            OverloadedError: MAX_WAITING computations run or wait.
        """
        run: asyncio.Future[Result] | None = self._runs.get(key)
        if run is None:
            if len(self._runs) >= MAX_WAITING:
                raise OverloadedError(f"{MAX_WAITING} computations over whole galleries run or wait")
            run = self._runs[key] = asyncio.ensure_future(self._in_turn(function))
            run.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(run)

    def _end(self, key: Hashable, done: asyncio.Future[Any]) -> None:
        del self._runs[key]
        if not done.cancelled():
            done.exception()  # mark as retrieved: perhaps all callers have left

    async def _in_turn(self, function: Callable[[], Result]) -> Result:
        context = copy_context()

        def run() -> Result:
            lower_thread_priority()
            return context.run(function)

        async with self._turn:
            return await asyncio.wrap_future(SingleFlight("heavy", run).start_or_join())

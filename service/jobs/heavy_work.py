"""Computations over whole galleries, outside of the threads of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

from service.core.single_flight import run_in_daemon
from service.index.faiss_structures import lower_thread_priority

Result = TypeVar("Result")


class HeavyWork:
    """Runs one computation at a time in a thread of low priority. For one event loop.

    Such a computation takes seconds to a minute. In the threads that decode photos, a few of them would stop all
    requests. The thread is a daemon, so that the process can exit meanwhile.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, function: Callable[[], Result]) -> Result:
        """Return the result of a blocking function, called in the order of requests, with the current context."""
        context = copy_context()

        def run() -> Result:
            lower_thread_priority()
            return context.run(function)

        async with self._turn:
            return await asyncio.wrap_future(run_in_daemon("heavy", run))

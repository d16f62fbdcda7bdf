"""Actor on whose behalf the current code runs, in tasks and in the threads of requests.

The API sets the actor for each request and the job runner for each job; the audit log reads it. A context variable
carries it along the asyncio task, and :class:`Threads` carry it into theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Final, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class Actor:
    """Originator of an operation.

    ``name`` is ``key:ID``, ``operator`` (KITH_API_KEY, or a command that opens the database), ``anonymous`` (no API key
    required) or ``service`` (internal work). ``request_id`` equals the X-Request-Id header of the response.
    """

    name: str
    request_id: str | None = None


SERVICE: Final = Actor("service")
_current_actor: Final = ContextVar("current_actor", default=SERVICE)


def current_actor() -> Actor:
    return _current_actor.get()


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """Set the current actor within the block."""
    token = _current_actor.set(actor)
    try:
        yield
    finally:
        _current_actor.reset(token)


class Threads(ThreadPoolExecutor):
    """Pool of ``count`` threads. Leaving it waits for running calls."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, name)
        self.count = count

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run a blocking function in a thread, with the current actor and context."""
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self, run, function, *arguments)


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return all results in order. On the first error, cancel the others and raise it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

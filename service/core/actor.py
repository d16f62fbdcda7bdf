"""Actor on whose behalf the current code runs, in tasks and in the threads of requests.

The API sets the actor for each request and the job runner for each job; the audit log reads it. A context variable
carries it along the asyncio task, and :func:`run_in_thread` carries it into threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Final, Self, TypeVar, TypeVarTuple

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


async def run_in_thread(threads: Executor, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Run a blocking function in a thread, with the current actor and context."""
    run = copy_context().run
    return await asyncio.get_running_loop().run_in_executor(threads, run, function, *arguments)


class RequestThreads:
    """The one pool of threads for the blocking work of requests: decoding, database, searches.

    Use as a context manager. Leaving it waits for running calls.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="blocking")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run a blocking function in a thread, with the current actor and context."""
        return await run_in_thread(self._pool, function, *arguments)

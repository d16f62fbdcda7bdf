"""On whose behalf something is done: set where a request comes in or a job is taken up, read where the audit is
written.

A context variable, for it concerns every write and no computation: asyncio carries it along a request, and
:func:`in_context` into its threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Final, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class Actor:
    """``name``: ``key:ID``, ``operator`` (KITH_API_KEY, or a command on the database itself), ``anonymous`` (no key is
    asked for) or ``service`` (of itself). ``request_id``: as in the answer's X-Request-Id, and in the log;
    ``trace_id``: where traces are collected."""

    name: str
    request_id: str | None = None
    trace_id: str | None = None


SERVICE: Final = Actor("service")
_acting: Final = ContextVar("acting", default=SERVICE)


def acting() -> Actor:
    return _acting.get()


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    token = _acting.set(actor)
    try:
        yield
    finally:
        _acting.reset(token)


async def in_context(threads: Executor, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Run something that blocks in a thread, on behalf of whom this is done."""
    run = copy_context().run
    return await asyncio.get_running_loop().run_in_executor(threads, run, function, *arguments)

"""On whose behalf something is done: set where a request comes in or a job is taken up, read where the audit is
written.

A context variable, for it concerns every write and no computation: asyncio and :func:`contextvars.copy_context` carry
it along a request, also into its threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Actor:
    """``name``: ``key:ID``, ``operator`` (KITH_API_KEY, or a command on the database itself), ``anonymous`` (no key is
    asked for) or ``service`` (of itself). ``request_id``: as in the answer's X-Request-Id, and in the log."""

    name: str
    request_id: str | None = None


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

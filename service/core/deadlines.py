"""Request deadlines: a request waits in queues until its time is up or its client disconnects.

Only waits end. Work that runs, such as a database write, is never interrupted: no request that commits is answered
with 504.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from contextvars import ContextVar, Token
from typing import Final, Self
from weakref import WeakValueDictionary

from service.core.errors import ClientGoneError, DeadlineExceededError, KithError

_CURRENT: Final[ContextVar[Deadline | None]] = ContextVar("deadline", default=None)


class Deadline:
    """Deadline of one request, ``seconds`` from now. It applies within its ``with`` block and tasks started there."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.expires_at = self._loop.time() + seconds
        """Expiry in the event loop's time."""
        self._seconds = seconds
        self._is_gone = False
        self.waits: set[asyncio.Timeout] = set()

    def __enter__(self) -> Self:
        self._token: Token[Deadline | None] = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)

    @property
    def remaining_s(self) -> float:
        return self.expires_at - self._loop.time()

    def error(self) -> KithError:
        """Return why the request has ended."""
        if self._is_gone:
            return ClientGoneError("the client closed the connection before its answer was ready")
        return DeadlineExceededError(f"not done after {self._seconds:g} s")

    def disconnect(self) -> None:
        """End the waits of the request, since the client closed the connection."""
        if self.remaining_s > 0:
            self._is_gone = True
            self.expires_at = self._loop.time()
            for wait in self.waits:
                if not wait.expired():
                    wait.reschedule(self.expires_at)


def remaining_s() -> float:
    """Return the time that the current request has left, infinite outside of requests. Callable from any thread."""
    deadline = _CURRENT.get()
    return math.inf if deadline is None else deadline.remaining_s


def check() -> None:
    """Raise DeadlineExceededError or ClientGoneError if the current request has ended. Callable from any thread."""
    deadline = _CURRENT.get()
    if deadline is not None and deadline.remaining_s <= 0:
        raise deadline.error()


@asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    """Cancel what the block waits for when the current request ends. Raises as :func:`check`."""
    deadline = _CURRENT.get()
    if deadline is None:
        yield
        return
    check()
    try:
        async with asyncio.timeout_at(deadline.expires_at) as wait:
            deadline.waits.add(wait)
            try:
                yield
            finally:
                deadline.waits.discard(wait)
    except TimeoutError as error:
        if not wait.expired():
            raise
        raise deadline.error() from error


class FairSemaphore:
    """FIFO semaphore of one event loop. Waiters leave when their deadline ends.

    A holder may have several of the ``count`` units. It waits until as many are free, and later waiters wait behind it.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def acquire(self, count: int = 1) -> None:
        """Acquire units. Raises DeadlineExceededError or ClientGoneError if the deadline ends first."""
        if count <= self._free and not self._waiting:
            self._free -= count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, count))
        try:
            async with in_time():
                await turn
        except BaseException:
            if turn.cancel() or turn.cancelled():
                self._admit()
            else:  # acquired, then canceled before resuming
                self.release(count)
            raise

    def release(self, count: int = 1) -> None:
        self._free += count
        self._admit()

    async def __aenter__(self) -> None:
        """Acquire one unit. Raises as :meth:`acquire`."""
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def _admit(self) -> None:
        """Admit waiters in order while units are free. Waiters that left are removed."""
        while self._waiting:
            turn, count = self._waiting[0]
            if not turn.done():
                if count > self._free:
                    return
                self._free -= count
                turn.set_result(None)
            self._waiting.popleft()


class Turns:
    """FIFO turns, one at a time for each key. For one event loop."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[Hashable, FairSemaphore] = WeakValueDictionary()

    def of(self, key: Hashable) -> FairSemaphore:
        """Return the context manager of a turn."""
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = FairSemaphore(1)
        return turn

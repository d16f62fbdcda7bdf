"""Request deadlines: queued work of a request is dropped when its time is up or its client disconnects."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Hashable
from contextvars import ContextVar, Token
from typing import Any, Final, Self
from weakref import WeakValueDictionary

from service.core.errors import ClientGoneError, DeadlineExceededError, KithError

_CURRENT: Final[ContextVar[Deadline | None]] = ContextVar("deadline", default=None)


class Deadline:
    """Deadline of one request, counted from :meth:`begin`.

    Within its ``with`` block, and in tasks started there, :func:`current_deadline` returns it. Expiry fails the futures
    that were bound to it; work that already runs, such as a database write, is not interrupted. Not thread-safe, except
    :meth:`check`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._ended: KithError | None = None
        self._waiting: set[asyncio.Future[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.expires_at = math.inf
        """Expiry in the event loop's time."""

    def begin(self) -> None:
        self.expires_at = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(self.expires_at, self._expire)

    def __enter__(self) -> Self:
        self._token: Token[Deadline | None] = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)
        if self._timer is not None:
            self._timer.cancel()

    @property
    def remaining_s(self) -> float:
        return self.expires_at - self._loop.time()

    def disconnect(self) -> None:
        """Fail the bound futures, since the client closed the connection."""
        self._end(ClientGoneError("the client closed the connection before its answer was ready"))

    def check(self) -> None:
        """Raise DeadlineExceededError or ClientGoneError if the deadline has ended. Callable from any thread."""
        if self._ended is not None:
            raise self._ended
        if self.remaining_s <= 0:  # the event loop has not run the timer yet
            raise self._exceeded()

    def bind(self, future: asyncio.Future[Any]) -> None:
        """Fail ``future`` when the deadline ends, unless it is done by then. Raises as :meth:`check`."""
        self.check()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

    def _expire(self) -> None:
        self._end(self._exceeded())

    def _exceeded(self) -> DeadlineExceededError:
        return DeadlineExceededError(f"not done after {self._seconds:g} s")

    def _end(self, error: KithError) -> None:
        self._ended = self._ended or error
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(self._ended)


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
        deadline = current_deadline()
        if deadline is not None:
            deadline.bind(turn)
        self._waiting.append((turn, count))
        try:
            await turn
        except BaseException:
            if not turn.cancelled() and turn.exception() is None:  # acquired, then canceled before resuming
                self.release(count)
            else:
                self._admit()
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


def current_deadline() -> Deadline | None:
    """Return the deadline of the current request, or None outside of requests."""
    return _CURRENT.get()

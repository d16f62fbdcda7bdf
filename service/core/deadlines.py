"""Request deadlines: queued work of a request is dropped when its time is up or its client disconnects."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Hashable
from contextvars import ContextVar, Token
from types import TracebackType
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """FIFO semaphore of one event loop. Waiters leave when their deadline ends."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        """Acquire a slot. Raises DeadlineExceededError or ClientGoneError if the deadline ends first."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        deadline = current_deadline()
        if deadline is not None:
            deadline.bind(turn)
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if not turn.cancelled() and turn.exception() is None:  # acquired, then cancelled before resuming
                self._release()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


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

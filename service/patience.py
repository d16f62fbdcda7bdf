"""How long whoever asked will wait: until a deadline, or until they leave. Then nothing more is computed for them."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, Self

from service.errors import ClientGoneError, DeadlineExceededError, KithError

_CURRENT: Final[ContextVar[Patience | None]] = ContextVar("patience", default=None)


class Patience:
    """One request's, counted from :meth:`begin`. Within its block, and in the tasks begun there, it is :func:`current`.

    It ends what waits, never what is under way: a write that has begun is not cut off. Of one event loop.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._ended: KithError | None = None
        self._waiting: set[asyncio.Future[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.deadline = math.inf
        """In the loop's time."""

    def begin(self) -> None:
        self.deadline = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(self.deadline, self._expire)

    def __enter__(self) -> Self:
        self._token: Token[Patience | None] = _CURRENT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CURRENT.reset(self._token)
        if self._timer is not None:
            self._timer.cancel()

    @property
    def left_s(self) -> float:
        return self.deadline - self._loop.time()

    def leave(self) -> None:
        """Nobody waits any more."""
        self._end(ClientGoneError("the client closed the connection before its answer was ready"))

    def check(self) -> None:
        """From any thread. Raises DeadlineExceededError, ClientGoneError: it has ended."""
        if self._ended is not None:
            raise self._ended
        if self.left_s <= 0:  # and the loop is late
            raise self._late()

    def hold(self, future: asyncio.Future[Any]) -> None:
        """Fail ``future`` when it ends, unless it is done before. Raises as :meth:`check` does."""
        self.check()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

    def _expire(self) -> None:
        self._end(self._late())

    def _late(self) -> DeadlineExceededError:
        return DeadlineExceededError(f"not done after {self._seconds:g} s")

    def _end(self, error: KithError) -> None:
        self._ended = self._ended or error
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(self._ended)


class Places:
    """A block that ``count`` may be in at once. The others wait in order, each for as long as their patience lasts; of
    one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        """Raises DeadlineExceededError, ClientGoneError: it ended meanwhile."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asking = current()
        if asking is not None:
            asking.hold(turn)
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if not turn.cancelled() and turn.exception() is None:  # it was let in, and cancelled before it knew
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def current() -> Patience | None:
    """Of the request that this is done for; None: nobody's."""
    return _CURRENT.get()

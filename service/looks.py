"""Looks at what may hang, such as a database: one at a time, and never for longer than who asks waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Generic, TypeVar

Seen = TypeVar("Seen")


class OneAtATime(Generic[Seen]):
    """Who asks while a look is under way shares it. Safe to share between threads."""

    def __init__(self, name: str, look: Callable[[], Seen]) -> None:
        self._name, self._look = name, look
        self._lock = Lock()
        self._latest: Future[Seen] | None = None

    def begun(self) -> Future[Seen]:
        """The look that is under way, begun by this call if there was none; nobody can cancel it."""
        with self._lock:
            if self._latest is None or self._latest.done():
                self._latest = Future()
                self._latest.set_running_or_notify_cancel()
                # Not an executor's, which the end of the process would wait for.
                Thread(target=self._take, args=(self._latest,), name=self._name, daemon=True).start()
            return self._latest

    def _take(self, asked: Future[Seen]) -> None:
        try:
            seen = self._look()
        except BaseException as error:
            asked.set_exception(error)
        else:
            asked.set_result(seen)

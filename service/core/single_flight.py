"""Single-flight: concurrent callers share one run of a blocking function, such as a database health check."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SingleFlight(Generic[Result]):
    """Function that runs at most once at a time. Thread-safe."""

    def __init__(self, name: str, function: Callable[[], Result]) -> None:
        self._name, self._function = name, function
        self._lock = Lock()
        self._latest: Future[Result] | None = None

    def start_or_join(self) -> Future[Result]:
        """Return the future of the current run, or start one. Callers cannot cancel it."""
        with self._lock:
            if self._latest is None or self._latest.done():
                self._latest = Future()
                self._latest.set_running_or_notify_cancel()
                # A daemon thread, not an executor: the process must be able to exit while the function hangs.
                Thread(target=self._run, args=(self._latest,), name=self._name, daemon=True).start()
            return self._latest

    def _run(self, future: Future[Result]) -> None:
        try:
            result = self._function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

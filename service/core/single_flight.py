"""Single-flight: concurrent callers share one run of a blocking function, such as a database health check."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Generic, TypeVar

Result = TypeVar("Result")


def run_in_daemon(name: str, function: Callable[[], Result]) -> Future[Result]:
    """Run a function in a thread of its own. Callers cannot cancel it.

    It is a daemon thread, not one of an executor: the process must be able to exit while the function hangs.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name=name, daemon=True).start()
    return future


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
                self._latest = run_in_daemon(self._name, self._function)
            return self._latest

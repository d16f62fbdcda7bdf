"""Ctrl-C and SIGTERM stop a run after the step in progress."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C or SIGTERM arrived. A second signal has its usual effect. Handlers are
    installed in the main thread only, and not where a caller ignores the signal or has its own handler."""
    received: list[int] = []
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    main = threading.current_thread() is threading.main_thread()
    replaced = {number: action for number, action in usual.items() if main and signal.getsignal(number) == action}

    def restore() -> None:
        for number, action in replaced.items():
            signal.signal(number, action)

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        restore()
        log.warning("stopping after this step; repeat to stop at once")

    for number in replaced:
        signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        restore()

"""Background task that looks for work at intervals and when it is woken."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self

from service.core.errors import KithError


class PeriodicTask(ABC):
    """Task that looks at once and every ``interval_s`` seconds; use as an async context manager.

    A look that fails is logged with the words ``failure``, and repeated after the interval. Leaving the context waits
    for the current look.
    """

    def __init__(self, interval_s: float, failure: str, log: logging.Logger) -> None:
        self._failure = failure
        self._log = log
        self._interval_s = interval_s
        self._wake = asyncio.Event()
        self._stopping = False
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        self._wake.set()
        try:
            if self._worker is not None:
                await self._worker
        finally:
            await self._close()

    def wake(self) -> None:
        """Look now. Call on the event loop."""
        self._wake.set()

    @abstractmethod
    async def _look(self) -> None:
        """Do the work that is due."""

    async def _close(self) -> None:  # noqa: B027 - most tasks hold nothing
        """Release what the task holds, after its last look."""

    async def _work(self) -> None:
        while not self._stopping:
            self._wake.clear()
            await self._try_to_look()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._interval_s)

    async def _try_to_look(self) -> None:
        try:
            await self._look()
        except KithError as error:
            self._log.warning("%s: %s", self._failure, error.detail)
        except Exception:
            self._log.exception(self._failure)

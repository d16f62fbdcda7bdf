"""Background tasks outlive failures, look at once when they are woken, and end in order."""

from __future__ import annotations

import asyncio
import logging

import pytest

from service.core.errors import StorageError
from service.core.periodic import PeriodicTask


class Task(PeriodicTask):
    """Fails at first, and is woken during these looks."""

    def __init__(self) -> None:
        super().__init__(60, "the look failed", logging.getLogger(__name__))
        self.failures = [StorageError("the disk is away"), RuntimeError("a bug")]
        self.events = list[str]()
        self.looking_well = asyncio.Event()

    async def _look(self) -> None:
        self.events.append("look")
        if self.failures:
            self.wake()
            raise self.failures.pop(0)
        self.looking_well.set()
        await asyncio.sleep(0.05)
        self.events.append("looked")

    async def _close(self) -> None:
        self.events.append("closed")


def test_a_task_outlives_failures_hears_each_wake_up_and_ends_after_its_look(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[str]:
        async with asyncio.timeout(30), Task() as task:
            await task.looking_well.wait()
        return task.events

    assert asyncio.run(run()) == ["look", "look", "look", "looked", "closed"]
    assert "the look failed: the disk is away" in caplog.text
    assert "RuntimeError: a bug" in caplog.text

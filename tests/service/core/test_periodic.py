"""Background tasks outlive failures, look at once when they are woken, and end in order."""

from __future__ import annotations

import asyncio
import logging

import pytest

from service.core.errors import StorageError
from service.core.periodic import PeriodicTask

log = logging.getLogger(__name__)


class Task(PeriodicTask):
    def __init__(self, *failures: Exception) -> None:
        super().__init__(60, "the look failed", log)
        self.failures = list(failures)
        self.events: list[str] = []
        self.looked = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def _look(self) -> None:
        self.events.append("look")
        self.looked.set()
        await self.go.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.events.append("looked")

    async def _close(self) -> None:
        self.events.append("closed")

    async def until_looked(self) -> None:
        await self.looked.wait()
        self.looked.clear()


def test_a_task_goes_on_after_failures(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[str]:
        async with Task(StorageError("the disk is away"), RuntimeError("a bug")) as task:
            for _ in range(3):
                await task.until_looked()
                task.wake()
        return task.events

    events = asyncio.run(run())
    assert events[:4] == ["look", "look", "look", "looked"]
    assert events[-1] == "closed"
    assert "the look failed: the disk is away" in caplog.text
    assert "RuntimeError: a bug" in caplog.text


@pytest.mark.parametrize(
    ("stays", "events"),
    [(True, ["look", "looked", "look", "looked", "closed"]), (False, ["look", "looked", "closed"])],
)
def test_a_wake_up_during_a_look_is_not_lost_and_leaving_waits_for_the_look(stays: bool, events: list[str]) -> None:
    async def run() -> list[str]:
        task = Task()
        task.go.clear()
        async with task:
            await task.until_looked()
            task.wake()
            if stays:
                task.go.set()
                await task.until_looked()
            else:
                asyncio.get_running_loop().call_later(0.05, task.go.set)
        return task.events

    assert asyncio.run(run()) == events

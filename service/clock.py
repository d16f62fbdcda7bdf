"""The wall clock, and whether what is deleted by age may rely on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from service.errors import ClockSteppedError

MAX_STEP: Final = timedelta(hours=1)
"""Difference between two clocks that deletion by age, which counts in days, tolerates."""


def boot_time_s() -> float:
    """Seconds since the machine started, suspended time included. Setting the wall clock does not change it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Clock:
    """Wall clock that is compared with the time since boot. ``wall``: aware, UTC. Safe to share between threads."""

    def __init__(
        self, wall: Callable[[], datetime] = lambda: datetime.now(UTC), boot_s: Callable[[], float] = boot_time_s
    ) -> None:
        self.now = wall
        self.boot_s = boot_s
        self._agreed = wall(), boot_s()

    def check(self, server: datetime | None = None) -> datetime:
        """Return the time, and take it as the reference for the next comparison. ``server``: time of the database
        server, which other Kith servers see, too.

        Raises:
            ClockSteppedError: the wall clock moved without the time passing, or the database server has another time.
        """
        now, boot_s = self.now(), self.boot_s()
        wall_before, boot_before = self._agreed
        step = (now - wall_before) - timedelta(seconds=boot_s - boot_before)
        if abs(step) > MAX_STEP:
            raise ClockSteppedError(
                f"the clock of this machine was moved by {_signed(step)}: it says {now:%Y-%m-%d %H:%M} UTC"
            )
        if server is not None and abs(now - server) > MAX_STEP:
            raise ClockSteppedError(
                f"this machine says {now:%Y-%m-%d %H:%M} UTC, the database server {server:%Y-%m-%d %H:%M} UTC"
            )
        self._agreed = now, boot_s
        return now


def _signed(step: timedelta) -> str:
    hours = step / timedelta(hours=1)
    return f"{hours / 24:+.1f} days" if abs(hours) >= 48 else f"{hours:+.1f} hours"

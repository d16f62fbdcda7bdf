"""Wall clock that detects jumps, so that retention does not delete data by a wrong time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from service.core.errors import ClockSteppedError

MAX_STEP: Final = timedelta(hours=1)
"""Tolerated difference between two clocks. Retention counts in days."""


def boot_time_s() -> float:
    """Return the seconds since boot, suspended time included. Setting the wall clock does not change it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Clock:
    """Wall clock, checked against the time since boot. ``wall`` returns aware UTC times. Thread-safe."""

    def __init__(
        self, wall: Callable[[], datetime] = lambda: datetime.now(UTC), boot_s: Callable[[], float] = boot_time_s
    ) -> None:
        self.now = wall
        self.boot_s = boot_s
        self._agreed = wall(), boot_s()

    def check(self, server: datetime | None = None) -> datetime:
        """Return the time, and use it as the reference of the next check.

        Args:
            server: Time of the database server, which all Kith servers share.

        Raises:
            ClockSteppedError: The wall clock jumped, or differs from the database server's.
        """
        now, boot_s = self.now(), self.boot_s()
        wall_before, boot_before = self._agreed
        step = (now - wall_before) - timedelta(seconds=boot_s - boot_before)
        if abs(step) > MAX_STEP:
            hours = step / timedelta(hours=1)
            raise ClockSteppedError(f"the clock jumped by {hours:+.1f} hours to {now:%Y-%m-%d %H:%M} UTC")
        if server is not None and abs(now - server) > MAX_STEP:
            raise ClockSteppedError(
                f"the clock of this machine is at {now:%Y-%m-%d %H:%M} UTC, the database server's at "
                f"{server:%Y-%m-%d %H:%M} UTC"
            )
        self._agreed = now, boot_s
        return now

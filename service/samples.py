"""What is told of the service but lies elsewhere, in the database above all: looked at when somebody asks, not oftener
than every few seconds, and never for longer than they wait."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from service.drift import Watches
from service.errors import KithError, StorageError
from service.gallery.follower import Followers
from service.gallery.job_store import JobStore
from service.gallery.retention import Due, Retention
from service.gallery.store import Store
from service.gallery.subjects import JobState, Sizes
from service.looks import OneAtATime
from service.readiness import Readiness

FRESH_S: Final = 5.0
PATIENT_S: Final = 1.0
"""How long who asks waits for a look that takes long, as one at a database that hangs."""
STALE_S: Final = 30.0
"""After which what was seen is told no more."""
MOST_LINES: Final = 10_000
"""Of a change log that are counted."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lag:
    """``lines`` of the change log that a gallery's index has yet to apply, which its next search does first; for how
    many ``seconds`` there have been some, as far as was looked."""

    lines: int
    seconds: float


@dataclass(frozen=True)
class Sample:
    """One look. ``taken``: seconds since 1970; ``at``: on the monotonic clock, which nobody sets; ``sizes``, ``jobs``,
    ``lags``: None while the database does not answer; ``disk``: free bytes of the data directory's file system, and
    all; ``held``: galleries whose retention waits for a confirmation; ``paused``: why this process deletes nothing for
    its age."""

    taken: float
    checks: Mapping[str, KithError | None]
    sizes: Sizes | None = None
    jobs: Mapping[JobState, int] | None = None
    lags: Mapping[str, Lag] | None = None
    disk: tuple[int, int] | None = None
    held: Mapping[str, Due] | None = None
    paused: KithError | None = None
    at: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.at

    @property
    def stale(self) -> bool:
        return self.age_s >= STALE_S

    @property
    def ready(self) -> bool:
        return not self.stale and not any(self.checks.values())


@dataclass
class Looking:
    """How a sample is taken; blocks. ``most_galleries``: whose sizes and lags are looked at. ``watches``: of galleries
    that another process deleted, they are dropped."""

    readiness: Readiness
    store: Store
    jobs: JobStore
    followers: Followers
    folder: Path
    most_galleries: int
    watches: Watches
    retention: Retention
    paused: Callable[[], KithError | None] = lambda: None
    _behind_since: dict[int, float] = field(default_factory=dict)

    def __call__(self) -> Sample:
        checks = self.readiness.look()
        disk, paused = _disk(self.folder), self.paused()
        try:
            self._drop_watches()
            sizes = self.store.sizes(self.most_galleries)
            held = self.retention.held()
            return Sample(time.time(), checks, sizes, self.jobs.states(), self._lags(), disk, held, paused)
        except StorageError:
            return Sample(time.time(), checks, disk=disk, paused=paused)

    def _drop_watches(self) -> None:
        watched = self.watches.known()  # first, for a gallery may be younger than the list
        if not watched:
            return
        there = self.store.gallery_keys()
        for name, pk in watched.items():
            if pk not in there:
                self.watches.drop(pk, name)

    def _lags(self) -> dict[str, Lag]:
        come = dict(sorted(self.followers.sequences().items())[: self.most_galleries])
        behind = self.store.lines_after({pk: sequence for (pk, _), sequence in come.items()}, MOST_LINES)
        now = time.monotonic()
        self._behind_since = {pk: self._behind_since.get(pk, now) for pk, lines in behind.items() if lines}
        return {name: Lag(behind[pk], now - self._behind_since.get(pk, now)) for pk, name in come}


class Samples:
    """One look at a time, in a thread of its own. Safe to share between threads."""

    def __init__(self, look: Callable[[], Sample], fresh_s: float = FRESH_S, patient_s: float = PATIENT_S) -> None:
        self._look = look
        self._fresh_s = fresh_s
        self._patient_s = patient_s
        self._looks = OneAtATime("samples", self._take)
        self._latest: Sample | None = None

    def latest(self) -> Sample | None:
        """As of some seconds ago at most, or, where a look takes longer than who asks waits, the one before; None:
        there was none. Blocks."""
        if (latest := self._latest) is not None and latest.age_s < self._fresh_s:
            return latest
        wait([self._looks.begun()], self._patient_s)
        return self._latest

    def _take(self) -> None:
        try:
            self._latest = self._look()
        except Exception:  # who asks is told by the sample's age
            log.exception("the service could not be looked at")


def _disk(folder: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free, usage.total

"""Cached samples of readiness and database state for metrics and status, taken on demand every few seconds."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kith.wire.common import JobState
from service.core.errors import KithError, StorageError
from service.core.single_flight import SingleFlight
from service.domain.gallery import GalleryCounts
from service.index.follower import Followers
from service.operations.readiness import Readiness
from service.risk.drift import Watches
from service.storage.privacy.retention import Due, Retention
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store

FRESH_S: Final = 5.0
TIMEOUT_S: Final = 1.0
"""Limit of a wait for a slow sample, such as with a database that hangs."""
STALE_S: Final = 30.0
"""Age after which a sample is not reported any more."""
MAX_LINES: Final = 10_000
"""Limit of the count of change log lines."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lag:
    """Change log ``lines`` not applied yet by a gallery's index, and for how many ``seconds`` there have been some.

    The next search applies them first.
    """

    lines: int
    seconds: float


@dataclass(frozen=True)
class ServiceState:
    """State of the service at one time. ``sizes``, ``jobs``, ``lags``, ``held``: None while the database is away.

    Attributes:
        taken: seconds since 1970.
        disk: free and total bytes of the data directory's file system.
        held: galleries whose retention waits for confirmation.
        paused: reason why retention is paused.
        at: monotonic time in seconds.
    """

    taken: float
    checks: Mapping[str, KithError | None]
    sizes: GalleryCounts | None = None
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
class StateReader:
    """Function that reads the state; blocks. It also drops the watches of galleries that other processes deleted.

    ``max_galleries``: number of galleries with sizes and lags.
    """

    readiness: Readiness
    store: Store
    jobs: JobStore
    followers: Followers
    folder: Path
    max_galleries: int
    watches: Watches
    retention: Retention
    paused: Callable[[], KithError | None] = lambda: None
    _behind_since: dict[int, float] = field(default_factory=dict)

    def __call__(self) -> ServiceState:
        checks = self.readiness.look()
        disk, paused = _disk(self.folder), self.paused()
        try:
            self._drop_watches()
            sizes = self.store.galleries.sizes(self.max_galleries)
            held = self.retention.held()
            return ServiceState(time.time(), checks, sizes, self.jobs.states(), self._lags(), disk, held, paused)
        except StorageError:
            return ServiceState(time.time(), checks, disk=disk, paused=paused)

    def _drop_watches(self) -> None:
        watched = self.watches.known()  # read first: a new gallery may be missing from the list
        if not watched:
            return
        there = self.store.galleries.keys()
        for name, pk in watched.items():
            if pk not in there:
                self.watches.drop(pk, name)

    def _lags(self) -> dict[str, Lag]:
        sequences = dict(sorted(self.followers.sequences().items())[: self.max_galleries])
        behind = self.store.changes.count_lags({pk: sequence for (pk, _), sequence in sequences.items()}, MAX_LINES)
        now = time.monotonic()
        self._behind_since = {pk: self._behind_since.get(pk, now) for pk, lines in behind.items() if lines}
        return {name: Lag(behind[pk], now - self._behind_since.get(pk, now)) for pk, name in sequences}


class RecentState:
    """Single-flight cache of the service's state. Safe to share between threads."""

    def __init__(
        self, look: Callable[[], ServiceState], fresh_s: float = FRESH_S, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._look = look
        self._fresh_s = fresh_s
        self._timeout_s = timeout_s
        self._looks = SingleFlight("samples", self._take)
        self._latest: ServiceState | None = None

    def latest(self) -> ServiceState | None:
        """Return a fresh sample, or the previous one if sampling exceeds the timeout; None: none yet. Blocks."""
        if (latest := self._latest) is not None and latest.age_s < self._fresh_s:
            return latest
        wait([self._looks.start_or_join()], self._timeout_s)
        return self._latest

    def _take(self) -> None:
        try:
            self._latest = self._look()
        except Exception:  # callers notice by the sample's age
            log.exception("sampling the service state failed")


def _disk(folder: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free, usage.total

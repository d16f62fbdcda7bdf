"""Readiness checks, and cached samples of readiness and database state, taken on demand every few seconds."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kith.wire.common import JobState
from service.core.errors import GpuUnavailableError, KithError, ReadinessUnknownError, StorageError
from service.core.single_flight import SingleFlight
from service.domain.gallery import GalleryCounts
from service.index.follower import Followers
from service.index.protocol import SharedEngine
from service.inference.batcher import FAILED_BATCHES, DevicePool
from service.risk.drift import Watches
from service.storage.audit.writer import AuditWriter
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store

CHECK_TIMEOUT_S: Final = 3.0
"""Limit of a wait for slow checks, such as of a database that hangs."""
FRESH_S: Final = 5.0
SAMPLE_TIMEOUT_S: Final = 1.0
"""Limit of a wait for a slow sample, such as with a database that hangs."""
STALE_S: Final = 30.0
"""Age after which a sample is not reported any more."""
MAX_LINES: Final = 10_000
"""Limit of the count of change log lines."""
log = logging.getLogger(__name__)


class Readiness:
    """Readiness checks by name. Each blocks, and raises a KithError if it fails."""

    def __init__(self, checks: Mapping[str, Callable[[], None]], timeout_s: float = CHECK_TIMEOUT_S) -> None:
        self._checks = checks
        self._timeout_s = timeout_s
        self._looks = SingleFlight("readiness", self._check)

    async def check(self) -> None:
        """Run all checks. Concurrent callers share one run (single-flight) and hold no thread.

        Raises:
            KithError: error of the first check that fails.
            ReadinessUnknownError: the checks exceed the timeout.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wrap_future(self._looks.start_or_join())
        except TimeoutError as error:
            raise ReadinessUnknownError(f"the checks did not finish within {self._timeout_s:g} s") from error

    async def holds(self) -> bool:
        """Return whether all checks succeed."""
        try:
            await self.check()
        except KithError:
            return False
        return True

    def _check(self) -> None:
        for check in self._checks.values():
            check()

    def look(self) -> dict[str, KithError | None]:
        """Run each check and return its error; None: success."""
        return {name: _error_of(check) for name, check in self._checks.items()}


def readiness(
    shortfalls: Sequence[str],
    allow_cpu: bool,
    devices: DevicePool,
    gpus: DevicePool | None,
    store: Store,
    milvus: SharedEngine | None,
    audit: AuditWriter,
) -> Readiness:
    """Return the checks of a service.

    ``shortfalls``: reasons why networks do not run on the requested GPU; ``gpus``: devices in use, if they are GPUs.
    """

    def gpu() -> None:
        if shortfalls and not allow_cpu:
            raise GpuUnavailableError(shortfalls[0])
        if gpus is not None and gpus.failing():
            raise GpuUnavailableError(f"a GPU failed in each of its last {FAILED_BATCHES} batches: see nvidia-smi")

    def alive() -> None:
        if not devices.alive:
            raise KithError("a device thread ended with an error (see the log); restart the service")

    checks: dict[str, Callable[[], None]] = {"devices": alive, "database": store.database.check_writable}
    if gpus is not None or (shortfalls and not allow_cpu):  # else no GPU is in use, whose state could be reported
        checks = {"gpu": gpu, **checks}
    if milvus is not None:
        checks["milvus"] = milvus.check
    return Readiness({**checks, "audit": audit.check})


def _error_of(check: Callable[[], None]) -> KithError | None:
    try:
        check()
    except KithError as error:
        return error
    return None


@dataclass(frozen=True)
class Lag:
    """Change log ``lines`` not applied yet by a gallery's index, and for how many ``seconds`` there have been some.

    The next search applies them first.
    """

    lines: int
    seconds: float


@dataclass(frozen=True)
class ServiceState:
    """State of the service at one time. ``sizes``, ``jobs``, ``lags``: None while the database is away.

    Attributes:
        taken: seconds since 1970.
        disk: free and total bytes of the data directory's file system.
        paused: reason why retention is paused.
        at: monotonic time in seconds.
    """

    taken: float
    checks: Mapping[str, KithError | None]
    sizes: GalleryCounts | None = None
    jobs: Mapping[JobState, int] | None = None
    lags: Mapping[str, Lag] | None = None
    disk: tuple[int, int] | None = None
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
    paused: Callable[[], KithError | None] = lambda: None
    _behind_since: dict[int, float] = field(default_factory=dict)

    def __call__(self) -> ServiceState:
        checks = self.readiness.look()
        disk, paused = _disk(self.folder), self.paused()
        try:
            self._drop_watches()
            sizes = self.store.galleries.sizes(self.max_galleries)
            return ServiceState(time.time(), checks, sizes, self.jobs.states(), self._lags(), disk, paused)
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
        self, look: Callable[[], ServiceState], fresh_s: float = FRESH_S, timeout_s: float = SAMPLE_TIMEOUT_S
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

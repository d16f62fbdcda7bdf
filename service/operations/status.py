"""Readiness checks, and cached samples of readiness and database state, taken on demand every few seconds."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import Field

from kith.wire.status import CheckOut, DiskOut, LagOut, SampleOut
from service.core.errors import KithError, RefusedError, StorageError
from service.core.single_flight import SingleFlight
from service.domain.gallery import GalleryCounts
from service.index.follower import Followers
from service.index.protocol import SharedEngine
from service.inference.batcher import FAILED_BATCHES, DevicePool
from service.risk.drift import Watches
from service.storage.audit.writer import AuditWriter
from service.storage.repositories.store import Store

CHECK_TIMEOUT_S: Final = 3.0
"""Limit of a wait for slow checks, such as of a database that hangs."""
FRESH_S: Final = 5.0
SAMPLE_TIMEOUT_S: Final = 1.0
"""Limit of a wait for a slow sample, such as with a database that hangs."""
STALE_S: Final = 30.0
"""Age after which a sample is not reported any more."""
MAX_GALLERIES: Final = 100
"""Maximum number of galleries with their own figures; /metrics counts the others together."""
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
            readiness_unknown: the checks exceed the timeout.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wrap_future(self._looks.start_or_join())
        except TimeoutError as error:
            raise RefusedError(
                "readiness_unknown", f"the checks did not finish within {self._timeout_s:g} s"
            ) from error

    async def holds(self) -> bool:
        """Return whether all checks pass. Raises errors that are no KithError."""
        try:
            await self.check()
        except KithError:
            return False
        return True

    def _check(self) -> None:
        for check in self._checks.values():
            check()

    def look(self) -> list[CheckOut]:
        """Run each check and return its result."""
        return [to_check_out(name, _error_of(check)) for name, check in self._checks.items()]


def readiness(
    shortfalls: Sequence[str],
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
        if shortfalls:
            raise RefusedError("gpu_unavailable", shortfalls[0])
        if gpus is not None and gpus.failing():
            raise RefusedError(
                "gpu_unavailable", f"a GPU failed in each of its last {FAILED_BATCHES} batches: see nvidia-smi"
            )

    def alive() -> None:
        if not devices.alive:
            raise KithError("a device thread ended with an error (see the log); restart the service")

    checks: dict[str, Callable[[], None]] = {"devices": alive, "database": store.database.check_writable}
    if gpus is not None or shortfalls:  # else no GPU is in use, whose state could be reported
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


def to_check_out(name: str, error: KithError | None) -> CheckOut:
    """Convert the result of a check. ``error`` is None if it passed."""
    if error is None:
        return CheckOut(name=name, ok=True)
    return CheckOut(name=name, ok=False, code=error.code, detail=error.detail, remedy=error.remedy)


class ServiceState(SampleOut):
    """State of the service at one time.

    Attributes:
        sizes: sizes of the galleries; None while the database is away.
        at: monotonic time in seconds; minus infinity before the first sample.
    """

    sizes: GalleryCounts | None = None
    at: float = Field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.at

    @property
    def stale(self) -> bool:
        return self.age_s >= STALE_S

    @property
    def ready(self) -> bool:
        return not self.stale and all(check.ok for check in self.checks)


@dataclass
class StateReader:
    """Function that reads the state; blocks. It also drops the watches of deleted galleries."""

    readiness: Readiness
    store: Store
    followers: Followers
    folder: Path
    watches: Watches
    paused: Callable[[], KithError | None] = lambda: None
    _behind_since: dict[int, float] = field(default_factory=dict)

    def __call__(self) -> ServiceState:
        state = ServiceState(
            looked_at=datetime.now(UTC),
            checks=self.readiness.look(),
            disk=_disk(self.folder),
            clock=to_check_out("clock", self.paused()),
        )
        with suppress(StorageError):
            self._drop_watches()
            sizes = self.store.galleries.sizes(MAX_GALLERIES)
            figures = {"sizes": sizes, "job_counts": self.store.jobs.states(), "index_lag": self._lags()}
            return state.model_copy(update=figures)
        return state

    def _drop_watches(self) -> None:
        watched = self.watches.watched()  # read first: a new gallery may be missing from the list
        if watched:
            self.watches.drop(watched.keys() - self.store.galleries.keys())

    def _lags(self) -> dict[str, LagOut]:
        sequences = dict(sorted(self.followers.sequences().items())[:MAX_GALLERIES])
        behind = self.store.changes.count_lags({pk: sequence for (pk, _), sequence in sequences.items()}, MAX_LINES)
        now = time.monotonic()
        self._behind_since = {pk: self._behind_since.get(pk, now) for pk, lines in behind.items() if lines}
        return {
            name: LagOut(line_count=behind[pk], seconds=now - self._behind_since.get(pk, now)) for pk, name in sequences
        }


class RecentState:
    """Single-flight cache of the service's state. Safe to share between threads."""

    def __init__(
        self, look: Callable[[], ServiceState], fresh_s: float = FRESH_S, timeout_s: float = SAMPLE_TIMEOUT_S
    ) -> None:
        self._look = look
        self._fresh_s = fresh_s
        self._timeout_s = timeout_s
        self._looks = SingleFlight("samples", self._take)
        self._latest = ServiceState(at=-math.inf)

    def latest(self) -> ServiceState:
        """Return a fresh sample, or the previous one, which may be empty, if sampling exceeds the timeout. Blocks."""
        if (latest := self._latest).age_s < self._fresh_s:
            return latest
        wait([self._looks.start_or_join()], self._timeout_s)
        return self._latest

    def _take(self) -> None:
        try:
            self._latest = self._look()
        except Exception:  # callers notice by the sample's age
            log.exception("sampling the service state failed")


def _disk(folder: Path) -> DiskOut | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return DiskOut(free_bytes=usage.free, size_bytes=usage.total)

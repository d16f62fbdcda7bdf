"""Readiness checks of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from service.core.errors import GpuUnavailableError, KithError, ReadinessUnknownError
from service.core.single_flight import SingleFlight
from service.index.protocol import SharedEngine
from service.inference.batcher import FAILED_BATCHES, DevicePool
from service.storage.audit.writer import AuditWriter
from service.storage.repositories.store import Store

TIMEOUT_S: Final = 3.0
"""Limit of a wait for slow checks, such as a database that hangs."""


@dataclass(frozen=True)
class Readiness:
    """Readiness checks by name. Each blocks, and raises a KithError if it fails."""

    checks: Mapping[str, Callable[[], None]]
    timeout_s: float = TIMEOUT_S
    _looks: SingleFlight[None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_looks", SingleFlight("readiness", self._check))

    async def check(self) -> None:
        """Run all checks. Concurrent callers share one run (single-flight) and hold no thread.

        Raises:
            KithError: error of the first check that fails.
            ReadinessUnknownError: the checks exceed the timeout.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                await asyncio.wrap_future(self._looks.start_or_join())
        except TimeoutError as error:
            raise ReadinessUnknownError(f"the checks did not finish within {self.timeout_s:g} s") from error

    async def holds(self) -> bool:
        """Return whether all checks succeed."""
        try:
            await self.check()
        except KithError:
            return False
        return True

    def _check(self) -> None:
        for check in self.checks.values():
            check()

    def look(self) -> dict[str, KithError | None]:
        """Run each check and return its error; None: success."""
        return {name: _error_of(check) for name, check in self.checks.items()}


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

    checks: dict[str, Callable[[], None]] = {"devices": alive, "database": store.galleries.ping}
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

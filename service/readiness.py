"""Whether the service can do its work: a few questions, each of which is answered alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from service.audit_writer import AuditWriter
from service.batching import FAILING, Devices
from service.errors import GpuUnavailableError, KithError, ReadinessUnknownError
from service.gallery.index import SharedEngine
from service.gallery.store import Store
from service.looks import OneAtATime

NAMES: Final = ("gpu", "devices", "database", "milvus", "audit")
PATIENT_S: Final = 3.0
"""How long who asks waits for checks that take long, as at a database that hangs."""


@dataclass(frozen=True)
class Readiness:
    """``checks``: by name, each raises a KithError where it fails; all block."""

    checks: Mapping[str, Callable[[], None]]
    patient_s: float = PATIENT_S
    _looks: OneAtATime[None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_looks", OneAtATime("readiness", self._check))

    async def check(self) -> None:
        """Holds no thread of its own while it waits, however many ask.

        Raises:
            KithError: of the first check that fails.
            ReadinessUnknownError: they do not come to an end.
        """
        try:
            async with asyncio.timeout(self.patient_s):
                await asyncio.wrap_future(self._looks.begun())
        except TimeoutError as error:
            raise ReadinessUnknownError(f"the checks have not come to an end within {self.patient_s:g} s") from error

    async def holds(self) -> bool:
        """Whether :meth:`check` finds nothing."""
        try:
            await self.check()
        except KithError:
            return False
        return True

    def _check(self) -> None:
        for check in self.checks.values():
            check()

    def look(self) -> dict[str, KithError | None]:
        """What each check says; None: all is well."""
        return {name: _asked(check) for name, check in self.checks.items()}


def readiness(
    shortfalls: Sequence[str],
    allow_cpu: bool,
    devices: Devices,
    gpus: Devices | None,
    store: Store,
    milvus: SharedEngine | None,
    audit: AuditWriter,
) -> Readiness:
    """Of the parts of a service. ``shortfalls``: why networks do not run on the GPU that is wanted; ``gpus``: those
    that they do run on."""

    def gpu() -> None:
        if shortfalls and not allow_cpu:
            raise GpuUnavailableError(shortfalls[0])
        if gpus is not None and gpus.failing():
            raise GpuUnavailableError(f"a GPU failed in each of its last {FAILING} batches: see nvidia-smi")

    def alive() -> None:
        if not devices.alive:
            raise KithError("a device's thread has ended by an error, which the log has; start the service again")

    checks: dict[str, Callable[[], None]] = {"gpu": gpu, "devices": alive, "database": store.check}
    if milvus is not None:
        checks["milvus"] = milvus.check
    return Readiness({**checks, "audit": audit.check})


def _asked(check: Callable[[], None]) -> KithError | None:
    try:
        check()
    except KithError as error:
        return error
    return None

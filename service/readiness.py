"""Whether the service can do its work: a few questions, each of which is answered alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from service.audit_writer import AuditWriter
from service.batching import FAILING, Devices
from service.errors import GpuUnavailableError, KithError
from service.gallery.index import SharedEngine
from service.gallery.store import Store

NAMES: Final = ("gpu", "devices", "database", "milvus", "audit")


@dataclass(frozen=True)
class Readiness:
    """``checks``: by name, each raises a KithError where it fails; all block."""

    checks: Mapping[str, Callable[[], None]]

    def check(self) -> None:
        """Raises the error of the first check that fails."""
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

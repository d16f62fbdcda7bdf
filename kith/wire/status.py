"""Health, status and models of a server."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from kith.wire.common import Engine, JobState, Precision
from kith.wire.fields import Timestamp
from kith.wire.galleries import DriftOut


class HealthOut(BaseModel):
    status: Literal["ok"] = "ok"
    version: str


class NetworkOut(BaseModel):
    file: str
    engine: Engine
    precision: Precision
    why: str = Field(description="Reason for this engine and precision.")
    providers: list[str]


class BetterPackOut(BaseModel):
    """Pack of the catalog that misses fewer people."""

    model: str
    fnir: float


class MissesOut(BaseModel):
    fpir: float
    subject_count: int = Field(description="Size of the gallery, with one photo a subject.")
    fnir: float = Field(description="Expected share of enrolled people's searches that do not identify them.")
    better: BetterPackOut | None = Field(None, description="The measured pack that misses fewest, if it misses fewer.")


class ModelOut(BaseModel):
    model: str
    display_name: str
    recognizer: str = Field(description="Fingerprint. Only vectors of the same recognizer can be compared.")
    dimension: int
    calibrated: bool
    detection: NetworkOut
    recognition: NetworkOut
    liveness: NetworkOut | None = Field(None, description="Liveness model of KITH_PACK, if it has one.")
    metrics: dict[str, Any]
    misses: list[MissesOut] = Field(
        default_factory=list, description="Expected misses of each FPIR; empty without a calibration."
    )


class ModelsOut(ModelOut):
    """The model of KITH_PACK; ``models`` lists it first, then all other served models."""

    models: list[ModelOut]


class CheckOut(BaseModel):
    """One readiness check. A failed check has the problem that /readyz returns."""

    name: str
    ok: bool
    code: str | None = None
    detail: str | None = None
    remedy: str | None = None


class QueueOut(BaseModel):
    """Queue of a network, with totals since the start."""

    network: str
    waiting_count: int = Field(description="Queued items of requests.")
    background_count: int = Field(description="Queued items of jobs.")
    batch_count: int
    seconds_per_item: float = Field(description="Recent time per item on one device; 0 before the first measurement.")
    refused_count: int = Field(description="Items rejected because the queue was full.")


class LagOut(BaseModel):
    line_count: int = Field(description="Changes that this process applies to its index before the next search.")
    seconds: float = Field(description="Age of the oldest of these changes.")


class AuditBacklogOut(BaseModel):
    waiting_count: int
    lost_count: int


class DiskOut(BaseModel):
    free_bytes: int
    size_bytes: int


class SampleOut(BaseModel):
    """Figures that were sampled at ``looked_at``, some seconds ago; null if unknown."""

    looked_at: Timestamp | None = None
    checks: list[CheckOut] = Field(default_factory=list)
    job_counts: dict[JobState, int] | None = None
    index_lag: dict[str, LagOut] | None = None
    disk: DiskOut | None = None
    clock: CheckOut | None = Field(
        None, description="Whether the clock is reliable; if not, nothing is deleted by age."
    )


class StatusOut(SampleOut):
    """Status of the process that answers, with its latest sample."""

    version: str
    model: str
    started_at: Timestamp
    uptime_s: float
    ready: bool
    master_key: CheckOut | None = Field(
        description="Whether the master key that Kith created was backed up; null if Kith did not create it."
    )
    request_count: int = Field(description="Requests in progress.")
    queues: list[QueueOut]
    audit: AuditBacklogOut
    drift: dict[str, DriftOut] = Field(description="Galleries searched since the start.")

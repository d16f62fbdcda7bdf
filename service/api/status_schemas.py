"""What GET /v1/status says over the wire."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from service.api.schemas import DriftOut
from service.errors import KithError
from service.gallery.subjects import JobState

if TYPE_CHECKING:  # a client has none of what these stand on
    from service.batching import Batcher
    from service.samples import Lag, Sample


class CheckOut(BaseModel):
    """One question of readiness; where it fails, as the problem that /readyz answers with."""

    name: str
    ok: bool
    code: str | None = None
    detail: str | None = None
    remedy: str | None = None

    @classmethod
    def of(cls, name: str, error: KithError | None) -> CheckOut:
        if error is None:
            return cls(name=name, ok=True)
        return cls(name=name, ok=False, code=error.code, detail=error.detail, remedy=error.remedy)


class QueueOut(BaseModel):
    """What waits for a network, and what went through it since the start."""

    network: str
    waiting: int = Field(description="Items of requests.")
    background: int = Field(description="Items of jobs.")
    batches: int
    seconds_per_item: float = Field(description="As measured lately, on one device; 0: nothing was.")
    refused: int = Field(description="Items that were not let in.")

    @classmethod
    def of(cls, batcher: Batcher[object, object]) -> QueueOut:
        return cls(
            network=batcher.name,
            waiting=batcher.turns.urgent,
            background=batcher.turns.behind,
            batches=sum(batcher.tally.run_s.counts),
            seconds_per_item=batcher.pace_s,
            refused=batcher.tally.refused,
        )


class LagOut(BaseModel):
    lines: int = Field(description="Changes that the index of this process has yet to apply: before its next search.")
    seconds: float = Field(description="For how long there have been some.")

    @classmethod
    def of(cls, lag: Lag) -> LagOut:
        return cls(lines=lag.lines, seconds=lag.seconds)


class AuditBacklogOut(BaseModel):
    waiting: int
    lost: int


class DiskOut(BaseModel):
    free_bytes: int
    size_bytes: int


class HeldOut(BaseModel):
    """Of a gallery whose retention waits for a confirmation, as of the latest sweep."""

    due_templates: int
    due_subjects: int
    templates: int
    subjects: int


class RetentionStatusOut(BaseModel):
    """``clock``: fails while this process deletes nothing for its age. ``held``: by gallery; null while it cannot be
    told."""

    clock: CheckOut
    held: dict[str, HeldOut] | None

    @classmethod
    def of(cls, sample: Sample) -> RetentionStatusOut:
        held = None
        if sample.held is not None:
            held = {
                name: HeldOut(
                    due_templates=due.templates,
                    due_subjects=due.subjects,
                    templates=due.of_templates,
                    subjects=due.of_subjects,
                )
                for name, due in sample.held.items()
            }
        return cls(clock=CheckOut.of("clock", sample.paused), held=held)


class StatusOut(BaseModel):
    """The process that answers. ``checks``, ``jobs``, ``index_lag``, ``disk``, ``retention``: as of ``looked_at``, some
    seconds ago; null while they cannot be told."""

    version: str
    model: str
    started_at: datetime
    uptime_s: float
    ready: bool
    looked_at: datetime | None
    checks: list[CheckOut]
    requests_in_progress: int
    queues: list[QueueOut]
    audit: AuditBacklogOut
    jobs: dict[JobState, int] | None
    drift: dict[str, DriftOut] = Field(description="Of the galleries that were searched since the start.")
    index_lag: dict[str, LagOut] | None
    disk: DiskOut | None
    retention: RetentionStatusOut | None

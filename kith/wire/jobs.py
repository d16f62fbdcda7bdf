"""Background jobs and their items."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from kith.wire.common import JobState
from kith.wire.faces import MAX_FACES
from kith.wire.fields import Problem, Timestamp


class JobOut(BaseModel):
    """Background job. ``done_count`` of ``total_count`` items are processed (null: not counted yet), ``failed_count``
    with a problem."""

    id: str
    kind: str
    gallery: str
    state: JobState
    canceling: bool = Field(description="Cancellation was requested; the job stops after the current item.")
    total_count: int | None
    done_count: int
    failed_count: int
    counts: dict[str, int] = Field(description="Items by result.")
    rate: float | None = Field(description="Items per second of working time.")
    remaining_s: float | None = Field(description="Estimated from the rate; null for a finished job.")
    details: dict[str, Any]
    problem: Problem | None = Field(description="Cause of a failed job.")
    created_at: Timestamp
    updated_at: Timestamp


class JobItemOut(BaseModel):
    item: str
    outcome: str = Field(
        description='Such as "enrolled", "already_enrolled", "ignored" (not a photo, or not in the manifest), or the '
        "code of the problem; empty after an erasure."
    )
    subject: str | None = Field(description="Null if the item has no subject, or after an erasure.")
    face_count: int | None = Field(
        None,
        description="Faces found in a photo. Of several, the one that is clearly the largest is enrolled; an album has "
        f"the {MAX_FACES} largest.",
    )
    problem: Problem | None
    at: Timestamp

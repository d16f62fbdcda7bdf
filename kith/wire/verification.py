"""Result of 1:1 verification."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kith.wire.common import VerifyOutcome
from kith.wire.faces import FaceOut
from kith.wire.identification import RiskOut


class SideOut(BaseModel):
    face: FaceOut | None = None
    faces_found: int | None = None


class VerifyOut(BaseModel):
    model: str
    outcome: VerifyOutcome
    similarity: float | None = Field(
        None, description="Coarse in a comparison with a subject without the scope vectors (docs/keys.md)."
    )
    threshold: float | None = None
    review_threshold: float | None = None
    false_match_probability: float | None = Field(
        None, description="Probability that two different people are at least this similar."
    )
    risk: RiskOut | None = None
    reasons: list[str] = Field(default_factory=list)
    a: SideOut
    b: SideOut

"""1:N identification: requests and results."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from kith.wire.common import FacesChoice, IdentifyOutcome, Source
from kith.wire.faces import FaceCountOut, FaceOut
from kith.wire.fields import MAX_FILTER_TAGS, Metadata, Problem, RequestModel, Tag
from kith.wire.photos import Probes
from kith.wire.risk import RiskIn
from kith.wire.strangers import SightingOut


class FilterIn(RequestModel):
    """Subjects must have all tags and all metadata entries."""

    tags: list[Tag] = Field(default_factory=list, max_length=MAX_FILTER_TAGS)
    metadata: Metadata = Field(default_factory=dict)


class IdentifyIn(Probes):
    faces: FacesChoice = "all"
    top_k: int = Field(5, ge=1, le=100)
    risk: RiskIn | None = Field(None, description="Default: the gallery's risk.")
    filter: FilterIn | None = None
    check_quality: bool = Field(True, description="Answer rejected_quality for faces below the gallery's quality gate.")
    one_face_per_person: bool | None = Field(
        None, description="Identify a person in at most one face of a photo. Default: the gallery's setting."
    )


class RiskOut(BaseModel):
    """The accepted risk of a decision."""

    fpir: float | None = None
    fmr: float | None = None
    threshold: float | None = None
    source: Source | Literal["explicit"] = Field(description="Evidence that the threshold comes from.")
    extrapolated: bool = Field(description="The risk is smaller than the evidence can support by counting.")


class CandidateOut(BaseModel):
    subject: str
    name: str | None = None
    similarity: float
    false_alarm_probability: float | None = None
    probability_is_bound: bool | None = None


class IdentityOut(BaseModel):
    """Result for one face, one embedding, or one photo without a usable face."""

    image: int | None = Field(None, description="Index of the photo in the request.")
    embedding: int | None = Field(None, description="Index of the embedding in the request.")
    face: FaceOut | None = None
    outcome: IdentifyOutcome | Literal["error"]
    subject: str | None = Field(None, description="Set only if the outcome is identified.")
    name: str | None = None
    similarity: float | None = Field(
        None,
        description="Similarity of the best candidate. Without the scope vectors it is coarse, and so are candidates, "
        "runner_up, margin and probabilities (docs/keys.md).",
    )
    threshold: float | None = None
    review_threshold: float | None = None
    runner_up: CandidateOut | None = None
    margin: float | None = None
    false_alarm_probability: float | None = Field(
        None, description="Probability that a stranger's best score in this gallery reaches this similarity."
    )
    probability_is_bound: bool | None = Field(
        None, description="The true probability is this or smaller: the evidence supports none below."
    )
    risk: RiskOut | None = None
    candidates: list[CandidateOut] = Field(default_factory=list)
    reasons: list[str] = Field(default_factory=list)
    other_face: int | None = Field(
        None,
        description="Index in results: the face of the same photo that the reason same_person_elsewhere is about.",
    )
    stranger: SightingOut | None = Field(
        None, description="Remembered stranger that an unknown face matched (docs/strangers.md)."
    )
    error: Problem | None = None


class IdentifyOut(BaseModel):
    gallery: str
    model: str
    recognizer: str
    images: list[FaceCountOut] = Field(default_factory=list, description="One item per photo, in request order.")
    results: list[IdentityOut]

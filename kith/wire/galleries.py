"""Galleries: settings, search index and drift."""

from __future__ import annotations

from pydantic import BaseModel, Field, FiniteFloat

from kith.wire.common import DriftState, IdentifyOutcome, IndexSetting, LivenessSetting
from kith.wire.fields import GalleryName, RequestModel, Timestamp
from kith.wire.risk import RiskIn


class QualityGateIn(RequestModel):
    min_eye_distance_px: FiniteFloat = Field(12.0, ge=0)
    min_sharpness: FiniteFloat = Field(2.0, ge=0)
    min_brightness: FiniteFloat = Field(25.0, ge=0, le=255)
    max_brightness: FiniteFloat = Field(235.0, ge=0, le=255)
    min_contrast: FiniteFloat = Field(10.0, ge=0)
    max_abs_yaw: FiniteFloat = Field(0.75, ge=0, le=1)


class GallerySettingsIn(RequestModel):
    risk: RiskIn | None = None
    quality_gate: QualityGateIn | None = None
    review_factor: FiniteFloat | None = Field(
        None,
        ge=1,
        le=1000,
        description="Matches between the accepted risk and this multiple of it are 'uncertain'; 1: no review zone.",
    )
    one_face_per_person: bool | None = Field(
        None, description="Identify a person in at most one face of a photo (docs/open-set.md); default true."
    )
    index: IndexSetting | None = Field(
        None, description="Search index: exact compares every vector; auto decides by the gallery's size."
    )
    recall: FiniteFloat | None = Field(None, ge=0.5, le=1, description="Required recall@1 of an approximate index.")
    keep_crops: bool | None = Field(
        None, description="Store the crop of each enrolled face, so that another recognizer can embed it."
    )
    retention_days: int | None = Field(
        None,
        ge=1,
        le=36_500,
        description="Age at which templates are erased, and subjects without templates; null: never.",
    )
    remember_strangers_days: int | None = Field(
        None,
        ge=1,
        le=3650,
        description="Remember unknown faces, until so many days after they were last seen (docs/strangers.md); null: "
        "never.",
    )
    liveness: LivenessSetting | None = Field(
        None, description="required: faces that fail the liveness check are neither searched nor enrolled."
    )
    liveness_threshold: FiniteFloat | None = Field(
        None, ge=0, le=1, description="Minimum score of a live face; null: the pack's."
    )


class GalleryIn(GallerySettingsIn):
    name: GalleryName


class ComparisonOut(BaseModel):
    observed: float
    expected: float
    z: float = Field(description="Observed minus expected, in standard errors.")


class DriftOut(BaseModel):
    """Recent decisions of the process that answers, compared with its calibration."""

    state: DriftState = Field(
        description="watch and drifted: 3 and 4 standard errors away. With unchanged decisions, fewer than one request "
        "in a thousand reports drifted."
    )
    detail: str
    window_counts: dict[IdentifyOutcome, int] = Field(description="The latest 1000 decisions by outcome.")
    since_start_counts: dict[IdentifyOutcome, int] = Field(description="All decisions since the process started.")
    mated_similarity: ComparisonOut | None = Field(
        None, description="Mean similarity of identified faces; null below 100 of them."
    )


class QualityGateOut(BaseModel):
    min_eye_distance_px: float
    min_sharpness: float
    min_brightness: float
    max_brightness: float
    min_contrast: float
    max_abs_yaw: float


class GalleryOut(BaseModel):
    name: str
    recognizer: str
    dimension: int
    risk: dict[str, float]
    quality_gate: QualityGateOut
    review_factor: float
    one_face_per_person: bool
    index: IndexSetting
    recall: float
    keep_crops: bool
    retention_days: int | None = None
    remember_strangers_days: int | None = None
    liveness: LivenessSetting
    liveness_threshold: float | None = Field(description="Null: the pack's.")
    subject_count: int
    template_count: int
    created_at: Timestamp
    drift: DriftOut | None = Field(None, description="Present only in the response about one gallery.")

"""Gallery settings in requests, and conversion of galleries and drift to responses."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field, FiniteFloat

from kith.wire.common import Fusion, IndexSetting, LivenessSetting
from kith.wire.galleries import ComparisonOut, DriftOut, GalleryOut, QualityGateOut
from models.vision.quality_gate import QualityGate
from service.domain.gallery import Gallery, GallerySettings
from service.risk.drift import DRIFT_DIGITS, Comparison, Drift
from service.schemas.fields import GalleryName, RequestModel
from service.schemas.risk import RiskIn


class QualityGateIn(RequestModel):
    min_eye_distance_px: FiniteFloat = Field(QualityGate.min_eye_distance_px, ge=0)
    min_sharpness: FiniteFloat = Field(QualityGate.min_sharpness, ge=0)
    min_brightness: FiniteFloat = Field(QualityGate.min_brightness, ge=0, le=255)
    max_brightness: FiniteFloat = Field(QualityGate.max_brightness, ge=0, le=255)
    min_contrast: FiniteFloat = Field(QualityGate.min_contrast, ge=0)
    max_abs_yaw: FiniteFloat = Field(QualityGate.max_abs_yaw, ge=0, le=1)


class GallerySettingsIn(RequestModel):
    risk: RiskIn | None = None
    fusion: Fusion | None = None
    quality_gate: QualityGateIn | None = None
    review_factor: FiniteFloat | None = Field(
        None,
        ge=1,
        le=1000,
        description="Matches between the accepted risk and this multiple of it are 'uncertain'; 1: no review zone.",
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
    liveness: LivenessSetting | None = Field(
        None, description="required: faces that fail the liveness check are neither searched nor enrolled."
    )
    liveness_threshold: FiniteFloat | None = Field(
        None, ge=0, le=1, description="Minimum score of a live face; null: the pack's."
    )

    def over(self, current: GallerySettings) -> GallerySettings:
        """Return the current settings, replaced where this request sets them."""
        nullable = {"retention_days", "liveness_threshold"}
        given = {
            name: getattr(self, name)
            for name in type(self).model_fields.keys() & vars(current).keys()
            if getattr(self, name) is not None or (name in nullable and name in self.model_fields_set)
        }
        if self.risk:
            given["risk"] = self.risk.target("fpir")
        if self.quality_gate:
            given["quality_gate"] = replace(current.quality_gate, **self.quality_gate.model_dump(exclude_unset=True))
        return replace(current, **given)


class GalleryIn(GallerySettingsIn):
    name: GalleryName


class RetentionIn(RequestModel):
    """Confirmation of one retention sweep. Nothing is erased if more than these counts is due."""

    templates: int = Field(ge=0, description="The due_templates of the retention report.")
    subjects: int = Field(ge=0, description="The due_subjects of the retention report.")


def to_gallery_out(gallery: Gallery) -> GalleryOut:
    """Convert a gallery, without drift."""
    settings = gallery.settings
    return GalleryOut(
        name=gallery.name,
        recognizer=gallery.fingerprint,
        dimension=gallery.dimension,
        risk={settings.risk.kind: settings.risk.value},
        quality_gate=QualityGateOut(**vars(settings.quality_gate)),
        subjects=gallery.subjects,
        templates=gallery.templates,
        created_at=gallery.created_at,
        **{name: value for name, value in vars(settings).items() if name not in ("risk", "quality_gate")},
    )


def to_drift_out(drift: Drift) -> DriftOut:
    """Convert a drift report. Means are rounded, because exact ones would reveal the similarity of one search."""

    def rounded(found: Comparison | None) -> ComparisonOut | None:
        if found is None:
            return None
        return ComparisonOut(observed=round(found.observed, DRIFT_DIGITS), expected=found.expected, z=round(found.z, 1))

    return DriftOut(
        state=drift.state,
        detail=drift.detail,
        window=drift.window,
        since_start=drift.since_start,
        mated_similarity=rounded(drift.mated),
        unknown_rate=rounded(drift.unknown),
    )

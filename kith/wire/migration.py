"""Migration of a gallery to another recognizer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from kith.wire.common import Source
from kith.wire.fields import ModelName, RequestModel
from kith.wire.risk import RiskIn


class MigrateIn(RequestModel):
    to: ModelName = Field(description="Name of a served pack, or fingerprint of its recognizer.")


class CutOverIn(RequestModel):
    min_share: float = Field(0.99, ge=0, le=1, description="Refuse if a smaller share of the templates has vectors.")
    force: bool = Field(False, description="Accept any share. Searches do not find templates without a vector.")
    risk: RiskIn | None = Field(
        None, description="New risk of the gallery; required if its current risk is a similarity threshold."
    )


class FinishIn(RequestModel):
    force: bool = Field(False, description="Finish although some templates have only vectors that are removed.")


class MigrationThresholdOut(BaseModel):
    risk: dict[str, float]
    threshold: float
    review_threshold: float
    source: Source | Literal["explicit"]
    extrapolated: bool


class GenerationOut(BaseModel):
    """Vectors of a gallery by one recognizer."""

    recognizer: str
    model: str | None = Field(description="Name of the recognizer's pack, if known.")
    served: bool = Field(description="The responding server has this recognizer.")
    dimension: int
    template_count: int
    embedded_count: int = Field(description="Templates that have a vector and can be found.")
    by_crop_count: int = Field(description="Templates embedded from stored crops since the start.")
    waiting_with_crop_count: int = Field(description="Templates that the job will embed.")
    waiting_without_crop_count: int = Field(description="Templates that must be enrolled again.")
    threshold: MigrationThresholdOut | None = Field(
        description="Threshold at the gallery's risk, from this recognizer's vectors; null without enough evidence."
    )


class MigrationOut(BaseModel):
    gallery: str
    state: Literal["none", "shadow", "cut_over", "set_aside"] = Field(
        description="shadow: the other recognizer's vectors are computed; cut_over: the other recognizer answered "
        "before; set_aside: rolled back."
    )
    current: GenerationOut = Field(description="The generation that answers requests.")
    other: GenerationOut | None
    jobs: list[str] = Field(description="Queued and running jobs of the migration.")

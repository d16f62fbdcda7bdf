"""Migration of a gallery to another recognizer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from kith.wire.common import Source
from kith.wire.fields import ModelName, RequestModel
from kith.wire.hygiene import TemplateRefOut

MigrationState = Literal["none", "running", "stopped", "switched"]


class MigrateIn(RequestModel):
    to: ModelName = Field(description="Name of a served pack, or fingerprint of its recognizer.")
    force: bool = Field(False, description="Leave out templates without a crop: searches do not find them.")


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
    threshold: MigrationThresholdOut | None = Field(
        description="Threshold at the gallery's risk, from this recognizer's vectors; null without enough evidence."
    )


class MigrationOut(BaseModel):
    gallery: str
    state: MigrationState = Field(
        description="running: a job computes the other recognizer's vectors, then switches; stopped: rolled back, or "
        "the job failed or was canceled; switched: the other recognizer answered before."
    )
    current: GenerationOut = Field(description="The generation that answers requests.")
    other: GenerationOut | None
    without_crop_count: int = Field(
        description="Templates that the new recognizer, or any if no migration began, did not and cannot embed."
    )
    without_crop: list[TemplateRefOut] = Field(description="The first 1,000 of these: enroll them again.")
    jobs: list[str] = Field(description="Queued and running jobs of the migration.")

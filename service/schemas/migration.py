"""Requests to migrate a gallery to another recognizer."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from service.schemas.fields import ModelName, RequestModel
from service.schemas.risk import RiskIn

DEFAULT_MIN_SHARE: Final = 0.99


class MigrateIn(RequestModel):
    to: ModelName = Field(description="Name of a served pack, or fingerprint of its recognizer.")
    on_sight: bool = Field(
        False,
        description="Use the vector of an identified face for a template of the same subject that has no crop. A false "
        "alarm would enroll a stranger's face: see docs/migration.md.",
    )


class CutOverIn(RequestModel):
    min_share: float = Field(
        DEFAULT_MIN_SHARE, ge=0, le=1, description="Refuse if a smaller share of the templates has vectors."
    )
    force: bool = Field(False, description="Accept any share. Searches do not find templates without a vector.")
    risk: RiskIn | None = Field(
        None, description="New risk of the gallery; required if its current risk is a similarity threshold."
    )


class FinishIn(RequestModel):
    force: bool = Field(False, description="Finish although some templates have only vectors that are removed.")

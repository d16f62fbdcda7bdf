"""What goes over the wire when a gallery moves to another recogniser."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from service.api.schemas import ModelName, Request, RiskIn
from service.decision import IdentifyOutcome, Source

MIN_SHARE = 0.99
"""Of the templates, that must have the new recogniser's vectors before it answers."""


class MigrateIn(Request):
    to: ModelName = Field(description="A served pack's name, or its recogniser's fingerprint.")
    on_sight: bool = Field(
        False,
        description="Let a face that is surely identified stand for a template of its subject that has no crop. A "
        "false alarm would enrol a stranger's face: see docs/migration.md.",
    )


class CutOverIn(Request):
    min_share: float = Field(MIN_SHARE, ge=0, le=1, description="Refuse while fewer templates have vectors.")
    force: bool = Field(False, description="Whatever the share: who has no vector is found by no search.")
    risk: RiskIn | None = Field(
        None, description="The gallery's from now on; needed where it answers by a bare similarity."
    )


class FinishIn(Request):
    force: bool = Field(False, description="Although templates have no vector but those that go.")


class MigrationThresholdOut(BaseModel):
    risk: dict[str, float]
    threshold: float
    review_threshold: float
    source: Source | Literal["explicit"]
    extrapolated: bool


class GenerationOut(BaseModel):
    """What one recogniser has seen of the gallery."""

    recogniser: str
    model: str | None = Field(description="Its pack, where it is known.")
    served: bool = Field(description="By the server that answers.")
    dimension: int
    templates: int
    embedded: int = Field(description="Templates with its vector: those that its searches find.")
    by_crop: int = Field(description="Embedded from kept crops, since the start.")
    by_sight: int = Field(description="Given the vector of a face that was identified, since the start.")
    waiting_with_crop: int = Field(description="To be embedded by the job.")
    waiting_without_crop: int = Field(description="To be seen, or enrolled anew.")
    threshold: MigrationThresholdOut | None = Field(
        description="At the gallery's risk, from this recogniser's own vectors; null where too little is known."
    )


class DisagreementOut(BaseModel):
    outcome: IdentifyOutcome
    subject: str | None = Field(description="Who was nearest, unless deleted since.")
    similarity: float | None
    shadow_outcome: IdentifyOutcome
    shadow_subject: str | None
    shadow_similarity: float | None


class ShadowOut(BaseModel):
    """How the shadow would have answered the searches by photo, as all servers counted them."""

    compared: int
    agreed: int = Field(description="The same outcome and, where somebody is identified, the same subject.")
    same_outcome: int
    same_nearest: int = Field(description="The same nearest subject, whatever the outcome.")
    absent: int = Field(
        description="Of those that disagree: who is nearest now has no vector of the shadow's recogniser yet."
    )
    skipped: dict[str, int] = Field(description="Faces that were not asked again, by reason.")
    disagreements: list[DisagreementOut] = Field(description="The latest.")


class MigrationOut(BaseModel):
    gallery: str
    state: Literal["none", "shadow", "cut_over", "set_aside"] = Field(
        description="shadow: the other is being made; cut_over: the other answered before; set_aside: rolled back."
    )
    on_sight: bool
    current: GenerationOut = Field(description="Whose vectors answer.")
    other: GenerationOut | None
    shadow: ShadowOut | None
    jobs: list[str] = Field(description="Those of the migration that wait or run.")

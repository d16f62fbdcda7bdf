"""Accepted risk in requests, and the risk report of a gallery: thresholds, curve and evidence."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, Field, model_validator

from kith.wire.common import Preset, RiskWarning, Source
from kith.wire.fields import RequestModel, Timestamp

Probability = Annotated[float, Field(ge=1e-12, lt=1)]
Similarity = Annotated[float, Field(ge=-1, le=1)]
PRESETS: Final[dict[Preset, float]] = {"strict": 0.0001, "standard": 0.001, "relaxed": 0.01}

INTERVAL = "Together with 'high', the 95 % confidence interval."


class RiskIn(RequestModel):
    """Exactly one of: the accepted false positive identification rate, the accepted false match rate, a preset of
    these (strict 0.0001, standard 0.001, relaxed 0.01), or a similarity threshold."""

    fpir: Probability | None = None
    fmr: Probability | None = None
    preset: Preset | None = None
    threshold: Similarity | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> RiskIn:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("give exactly one of fpir, fmr, preset, threshold")
        return self


class EvidenceOut(BaseModel):
    source: Source
    gallery_share: float = Field(description="Weight of the gallery's own evidence; the rest is the pack's.")
    pair_count: int = Field(description="Compared pairs of the gallery's subjects.")
    probe_count: int = Field(description="Subjects searched for among all others.")
    duplicate_pair_count: float = Field(description="Excluded pairs that look like one person enrolled twice.")
    pack_pair_count: int
    fmr_over_pack: float | None = Field(
        None,
        description="How often people of the gallery match each other, divided by how often those of the pack's "
        "calibration do, at the similarity that 0.1 % of the latter reach. Null without both.",
    )
    derived_at: Timestamp | None
    up_to_date: bool = Field(description="False while a change of more than 2 % of the templates is processed.")


class ThresholdOut(BaseModel):
    """Threshold at one gallery size. No face reaches a similarity above 1."""

    subject_count: int
    threshold: float
    low: float = Field(description=INTERVAL)
    high: float
    extrapolated: bool
    fnir: float | None = Field(
        None,
        description="Promised share of enrolled people's searches that do not identify them, for photos like those "
        "enrolled.",
    )
    fnir_low: float | None = Field(None, description="Together with 'fnir_high', the 95 % interval of 'fnir'.")
    fnir_high: float | None = None


class TargetOut(BaseModel):
    fpir: float
    today: ThresholdOut
    grown: ThresholdOut = Field(description="At ten times today's size, with the same distribution of strangers.")


class PointOut(BaseModel):
    similarity: float
    fpir: float
    low: float = Field(description=INTERVAL)
    high: float
    extrapolated: bool


class HoldoutCheckOut(BaseModel):
    """Leave-one-out check: number of held-out subjects whose search reaches the threshold of ``fpir``."""

    fpir: float
    probe_count: int
    expected: float
    observed_count: int


class MoveOut(BaseModel):
    """Latest move of the threshold. The audit has all."""

    before: float | None = Field(description="Null for the first estimate.")
    after: float | None
    reason: str


class MostResembledOut(BaseModel):
    """The tenth of the people who are most like strangers."""

    level: float = Field(description="How much higher the threshold of each of them is, at least.")
    share: float = Field(description="Expected share of the false alarms that fall to them.")


class GalleryRiskOut(BaseModel):
    gallery: str
    subject_count: int = Field(description="Subjects with a template when the evidence was derived.")
    risk: dict[str, float] = Field(description="The gallery's setting.")
    threshold: float = Field(
        description="Threshold for a person of the usual level, of a search whose runner-up has the similarity 'rival'."
    )
    review_threshold: float
    rival: float | None = Field(
        None,
        description="Usual similarity of the runner-up. A search adds a quarter of the runner-up's similarity minus "
        "this value to its thresholds. Null if thresholds are fixed.",
    )
    most_resembled: MostResembledOut | None = Field(
        None,
        description="Each person's threshold is higher by its level: how much more than usual strangers resemble it. "
        "Null if thresholds are fixed, and below ten subjects.",
    )
    evidence: EvidenceOut
    targets: list[TargetOut]
    curve: list[PointOut]
    check: HoldoutCheckOut | None
    last_move: MoveOut | None = Field(None, description="Why the threshold moved, in words.")
    warnings: list[RiskWarning] = Field(
        default_factory=list,
        description="photos_of_one_sitting: the photos of most subjects look like one sitting's, so 'fnir' holds for "
        "photos like those. people_unlike_calibration: strangers here match each other several times as often, or as "
        "rarely, as in the pack's calibration.",
    )

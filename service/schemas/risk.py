"""Accepted risk in requests, and thresholds in responses."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from kith.wire.risk import ThresholdOut
from service.domain.outcomes import RiskTarget
from service.risk.risk_report import TargetThreshold
from service.schemas.fields import RequestModel

Probability = Annotated[float, Field(ge=1e-12, lt=1)]
Similarity = Annotated[float, Field(ge=-1, le=1)]
PRESETS: Final = {"strict": 0.0001, "standard": 0.001, "relaxed": 0.01}
PRESET_RATES: Final = tuple(PRESETS.values())


class RiskIn(RequestModel):
    """Exactly one of: the accepted false positive identification rate, the accepted false match rate, a preset of
    these (strict 0.0001, standard 0.001, relaxed 0.01), or a similarity threshold."""

    fpir: Probability | None = None
    fmr: Probability | None = None
    preset: Literal["strict", "standard", "relaxed"] | None = None
    threshold: Similarity | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> RiskIn:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("give exactly one of fpir, fmr, preset, threshold")
        return self

    def target(self, preset_kind: Literal["fpir", "fmr"]) -> RiskTarget:
        """Return the risk target. ``preset_kind`` is the rate that a preset stands for."""
        if self.preset is not None:
            return RiskTarget(preset_kind, PRESETS[self.preset])
        if self.threshold is not None:
            return RiskTarget("threshold", self.threshold)
        if self.fpir is not None:
            return RiskTarget("fpir", self.fpir)
        assert self.fmr is not None  # noqa: S101 - guaranteed by the validator
        return RiskTarget("fmr", self.fmr)


def to_threshold_out(found: TargetThreshold) -> ThresholdOut:
    """Convert a threshold, rounded to 4 decimals."""
    rounded = {name: round(getattr(found, name), 4) for name in ("threshold", "low", "high")}
    misses = found.misses
    fnir, low, high = (None, None, None) if misses is None else (round(v, 4) for v in vars(misses).values())
    return ThresholdOut(
        subjects=found.subjects,
        extrapolated=found.extrapolated,
        fnir=fnir,
        fnir_low=low,
        fnir_high=high,
        **rounded,
    )

"""Accepted risks and outcomes: words that galleries, decisions and answers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from kith.wire.risk import PRESETS, RiskIn

RiskKind = Literal["fpir", "fmr", "threshold"]
RejectionOutcome = Literal["rejected_quality", "rejected_liveness"]

REVIEW_FACTOR: Final = 10.0
"""Review risk as a multiple of the target risk. Between the two, the outcome is 'uncertain'."""


@dataclass(frozen=True)
class RiskTarget:
    """Accepted risk: a false positive identification rate, a false match rate, or a fixed similarity."""

    kind: RiskKind
    value: float


def to_risk_target(asked: RiskIn, preset_kind: Literal["fpir", "fmr"]) -> RiskTarget:
    """Return the risk of a request. ``preset_kind``: the rate that a preset stands for."""
    if asked.preset is not None:
        return RiskTarget(preset_kind, PRESETS[asked.preset])
    kinds: tuple[RiskKind, ...] = get_args(RiskKind)
    return next(RiskTarget(kind, value) for kind in kinds if (value := getattr(asked, kind)) is not None)

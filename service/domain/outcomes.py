"""Accepted risks and outcomes: words that galleries, decisions and answers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

RejectionOutcome = Literal["rejected_quality", "rejected_liveness"]

REVIEW_FACTOR: Final = 10.0
"""Review risk as a multiple of the target risk. Between the two, the outcome is 'uncertain'."""


@dataclass(frozen=True)
class RiskTarget:
    """Accepted risk: a false positive identification rate, a false match rate, or a fixed similarity."""

    kind: Literal["fpir", "fmr", "threshold"]
    value: float

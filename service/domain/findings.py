"""Findings of the hygiene report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, get_args

from kith.wire.common import HygieneKind
from models.risk.calibration import Estimate

KINDS: Final[tuple[HygieneKind, ...]] = get_args(HygieneKind)
"""Kinds in the order of the report."""


@dataclass(frozen=True)
class HygieneFinding:
    """Problem of one or two subjects, by primary key.

    Attributes:
        templates: Templates in question; for duplicates and lookalikes the most similar pair.
        rank: Confidence, for the order of findings of one kind.
        similarity: Mean over the compared templates, None without a similar subject.
        chance: Share of pairs of different people with such a score.
        odds: Odds that two subjects are one person, or that templates show another person than their subject.
        own_similarity: Similarity of the templates to the nearest other template of their subject.
        belongs_to: Subject to which the templates should be moved.
    """

    kind: HygieneKind
    subjects: tuple[int, ...]
    templates: tuple[int, ...]
    action: str
    rank: float
    similarity: float | None = None
    chance: float | None = None
    odds: float | None = None
    own_similarity: float | None = None
    belongs_to: int | None = None


@dataclass(frozen=True)
class HygieneReport:
    """Findings by kind as in ``KINDS``, then by confidence.

    ``nearest`` are the next similar pairs of subjects, as lookalikes, however small their odds. ``recall`` is the share
    of duplicates that findings are expected to show; None below two subjects.
    """

    findings: Sequence[HygieneFinding]
    nearest: Sequence[HygieneFinding]
    recall: Estimate | None

    def __len__(self) -> int:
        return len(self.findings) + len(self.nearest)

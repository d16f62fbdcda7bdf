"""Odds that two subjects of a gallery are one person, from their similarity. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.risk.calibration import (
    EDGES,
    MIN_RATE,
    Calibration,
    Estimate,
    Floats,
    FmrCurve,
    count_at_or_above,
    histogram,
)
from models.risk.gallery_risk import GalleryRisk
from models.risk.impostor_evidence import ImpostorEvidence, rival_shift
from models.risk.miss_rate import PACK_PEOPLE, wilson

DUPLICATE_SHARE: Final = 0.01
"""Prior share of subjects that are enrolled a second time."""
KERNEL_STD_BINS: Final = 30
"""Smoothing of the density of same-person similarities, in bins."""
MAX_ODDS: Final = 1e6
"""Largest odds, and the inverse of the smallest: the densities say nothing about rarer pairs."""
MAX_RATIO: Final = 1e12
"""Largest likelihood ratio, and the inverse of the smallest."""


@dataclass(frozen=True, eq=False)
class PairOdds:
    """Likelihood ratios of rival-adjusted similarities between two subjects.

    Args:
        curve: FMR of the scores in this gallery.
        min_fmr: smallest FMR that the evidence supports.
        rival: usual largest similarity of a subject to the others; None leaves similarities as they are.
        ratios: (2001,) likelihood ratio at EDGES, same person over different people, non-decreasing.
        same: (2001,) weight of same-person pairs at or above EDGES, in people.
        subjects: number of subjects in the gallery.
    """

    curve: FmrCurve
    min_fmr: float
    rival: float | None
    ratios: Floats
    same: Floats
    subjects: int

    @classmethod
    def of(cls, evidence: ImpostorEvidence, pack: Calibration, same: Floats) -> PairOdds:
        """Derive the odds.

        Args:
            evidence: each sampled subject compared with all others.
            same: (k,) similarities between two halves of the templates of subjects. The pack's same-person pairs count
                as PACK_PEOPLE more.
        """
        risk = GalleryRisk(evidence, pack)
        weights = histogram(same) + pack.genuine * (PACK_PEOPLE / pack.genuine_pairs)
        ratios = likelihood_ratios(risk.curve, weights)
        above = count_at_or_above(weights)
        return cls(risk.curve, risk.min_fmr, evidence.rival, ratios, above, evidence.subjects)

    def adjusted(self, similarity: float, runners_up: tuple[float, float]) -> float:
        """Return the score of a pair. ``runners_up``: each subject's similarity to its next similar subject."""
        if self.rival is None:
            return similarity
        return min(1.0, similarity - rival_shift(sum(runners_up) / 2, self.rival))

    def chance(self, score: float) -> float:
        """Return the share of pairs of different people with such a score, as small as the evidence supports."""
        return max(self.min_fmr, self.curve.fmr(score).value)

    def ratio(self, score: float) -> float:
        """Return how many times as often two photos of one person have this score as those of two people."""
        return float(np.exp(log_ratio_at(self.ratios, score)))

    def odds(self, score: float) -> float:
        """Return the odds that a pair with this score is one person, if DUPLICATE_SHARE are enrolled twice."""
        return bounded(2 * DUPLICATE_SHARE / (self.subjects - 1) * self.ratio(score))

    def recall(self, odds: float) -> Estimate:
        """Return the expected share of duplicates with at least these odds, with its 95 % interval."""
        wanted = odds * (self.subjects - 1) / (2 * DUPLICATE_SHARE)
        row = min(int(np.searchsorted(self.ratios, wanted)), len(EDGES) - 1)
        return wilson(float(self.same[row]), float(self.same[0]))


def likelihood_ratios(curve: FmrCurve, same: NDArray[Any]) -> Floats:
    """Return the (2001,) likelihood ratios at EDGES, same person over different people, non-decreasing.

    Args:
        curve: FMR of the scores of different people.
        same: (2000,) histogram of the scores of one person, smoothed here.
    """
    kernel = np.exp(-0.5 * (np.arange(-4 * KERNEL_STD_BINS, 4 * KERNEL_STD_BINS + 1) / KERNEL_STD_BINS) ** 2)
    density = np.convolve(same / same.sum(), kernel / kernel.sum(), "same")
    ratios = density / np.maximum(curve.rates[:-1] - curve.rates[1:], MIN_RATE)
    # A more similar pair is never less likely one person; sparse scores alone would make it so.
    return np.clip(np.maximum.accumulate(np.append(ratios, ratios[-1])), 1 / MAX_RATIO, MAX_RATIO)


def log_ratio_at(ratios: Floats, score: float) -> float:
    """Return the natural logarithm of :func:`likelihood_ratios` at a score."""
    return float(np.interp(score, EDGES, np.log(ratios)))


def bounded(odds: float) -> float:
    """Return the odds within their bounds."""
    return min(MAX_ODDS, max(1 / MAX_ODDS, odds))

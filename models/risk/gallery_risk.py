"""False match rate of one gallery, estimated from its own impostor pairs and the pack's calibration.

Any two subjects of a gallery are an impostor pair. Their similarities show how the recognizer treats the photos of this
gallery, without any labeled probe.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np

from models.risk.calibration import (
    EDGES,
    MIN_RATE,
    SMALLEST_TAIL,
    Calibration,
    Estimate,
    Floats,
    FmrCurve,
    Ints,
    count_at_or_above,
)
from models.risk.impostor_evidence import ImpostorEvidence
from models.risk.normal_scale import rates_of
from models.risk.tail import TailFit, fit_on_scale

MAX_DUPLICATE_SHARE: Final = 0.1
"""Largest share of subjects that are treated as duplicates of another subject."""
COPY: Final = 0.99
"""Similarity of copies of a photo, which no two people reach. A gallery of copies alone tells nothing of its people."""
DUPLICATE_ROUNDS: Final = 2
"""Duplicates affect the fitted curve, and the curve identifies duplicates."""
USUAL_ADJUSTED: Final = (0.15, -0.06)
"""Usual place and log width of rival-adjusted similarities. From 0, galleries of CFP are asked 0.5 of their risk."""
UNLIKE_FMR: Final = 0.001
UNLIKE_RATIO: Final = 3.0
"""Ratio of false match rates, beyond the interval, from which a gallery's people differ from the pack's."""
RULE_OF_THREE: Final = 3.0
"""Zero matches of n pairs are compatible with a rate up to 3 / n at 95 % confidence (J. Hanley, 1983)."""


class GalleryRisk:
    """FMR of one gallery, from its own impostor pairs and the pack's calibration.

    The gallery has the right photos but few pairs. Its scores follow a normal distribution on the scale of the pack
    (:mod:`models.risk.tail`). Likely duplicates are removed: each score counts by the probability that it is of
    different people.

    Two curves: ``curve`` for searches, fitted to the searches of enrolled people among the others, and ``raw_curve`` of
    single similarities, fitted to all pairs.

    The 95 % intervals come from the inverse Hessian of the fit. In simulated galleries of 30 to 200 people they cover
    the true rate in 90 to 100 % of cases. They do not cover probes unlike the gallery.

    Args:
        evidence: impostor pairs of the gallery, with at least two probes.
        pack: calibration of the pack; None uses the gallery alone.
    """

    def __init__(self, evidence: ImpostorEvidence, pack: Calibration | None) -> None:
        self.evidence = evidence
        self.pack = pack
        usual = _own_curve(evidence) if pack is None else pack.curve
        self._scale = usual.scale
        self._fit, self.duplicate_pairs = self._searches()
        self.curve = self._fit.curve

    @cached_property
    def raw_curve(self) -> FmrCurve:
        """Curve of single similarities, for verification and FMR targets.

        Each person counts as one observation.
        """
        pairs, people = self.evidence.pair_count, self.evidence.probes
        counts = self.evidence.pairs / self.evidence.pairs.sum() * pairs
        if self.pack is not None:
            rates, share = self.pack.curve.rates, min(1.0, MAX_DUPLICATE_SHARE * self.evidence.subjects / pairs)
            counts = counts * impostor_probability(counts, rates, self.pack.genuine, share)
        return fit_on_scale(self._scale, counts, 1, people / pairs).curve

    @property
    def gallery_share(self) -> float:
        """Share of the estimate that the gallery's own scores determine; the rest is the pack's prior."""
        return 1.0 if self.pack is None else self._fit.own_share

    @property
    def min_fmr(self) -> float:
        """Smallest FMR that the pairs of gallery and pack support by counting."""
        return min_supported_fmr(self.evidence.pair_count + (0 if self.pack is None else self.pack.impostor_pairs))

    def fmr_over_pack(self) -> Estimate | None:
        """Return the ratio of the gallery's FMR to the pack's, where the pack's is UNLIKE_FMR; None without a pack."""
        if self.pack is None:
            return None
        rate = self.raw_curve.fmr(self.pack.curve.threshold_at_fmr(UNLIKE_FMR).value)
        return Estimate(rate.value / UNLIKE_FMR, rate.low / UNLIKE_FMR, rate.high / UNLIKE_FMR)

    def is_unlike_pack(self) -> bool:
        """Return whether strangers match UNLIKE_RATIO times as often, or as rarely, as in the pack's calibration."""
        ratio = self.fmr_over_pack()
        return ratio is not None and (ratio.low > UNLIKE_RATIO or ratio.high < 1 / UNLIKE_RATIO)

    def _searches(self) -> tuple[TailFit, float]:
        """Return the fit to the searches of enrolled people, and the number of duplicate pairs that it leaves out."""
        scores, others = self.evidence.best.astype(np.float64), self.evidence.subjects - 1
        usual = (0.0, 0.0) if self.evidence.rival is None else USUAL_ADJUSTED
        first = scores if self.pack is None else _lowered(scores)
        fit, different = fit_on_scale(self._scale, first, others, usual=usual), scores
        for _ in range(DUPLICATE_ROUNDS):
            if self.pack is None:
                break
            rates = -np.expm1(others * np.log1p(-np.minimum(fit.curve.rates, 1 - SMALLEST_TAIL)))
            different = scores * impostor_probability(scores, rates, self.pack.genuine, MAX_DUPLICATE_SHARE)
            fit = fit_on_scale(self._scale, different, others, usual=usual)
        return fit, float(scores.sum() - different.sum()) / 2


def _lowered(scores: Floats) -> Floats:
    """Return the scores without copies, and with the largest, possible duplicates, moved to the next: they hardly tell
    how large. Fitted to all scores, galleries of 300 people of LFW, of whom a tenth is enrolled twice, miss 10.0
    instead of 7.5 % at 1 %."""
    scores = np.where(EDGES[:-1] < COPY, scores, 0.0)
    above, bins = count_at_or_above(scores), np.arange(len(scores))
    row = np.count_nonzero(above > max(2.0, MAX_DUPLICATE_SHARE * above[0])) - 1  # two people are one duplicate
    return np.where(bins < row, scores, above[:-1] * (bins == row))


def _own_curve(evidence: ImpostorEvidence) -> FmrCurve:
    """Return the curve of a gallery without a pack, from all of its pairs."""
    shares = count_at_or_above(evidence.pairs) / evidence.pairs.sum()
    rates = rates_of(shares, evidence.pair_count, evidence.probes)
    return FmrCurve(rates, np.zeros(len(EDGES)), -1.0)


def min_supported_fmr(pairs: int) -> float:
    """Return the smallest FMR that can be claimed after so many pairs without a match."""
    return RULE_OF_THREE / pairs


def impostor_probability(counts: Floats, rates: Floats, genuine: Ints, max_share: float) -> Floats:
    """Return the (2000,) probability that a pair of the bin shows different people, positive.

    Expectation maximization over the share of pairs that show one person, whose similarities follow the pack's genuine
    pairs.

    Args:
        counts: (2000,) numbers of pairs by score.
        rates: (2001,) FMR at EDGES.
        genuine: (2000,) counts of same-person similarities.
        max_share: largest share of pairs that show one person.
    """
    impostor = np.maximum(rates[:-1] - rates[1:], MIN_RATE)
    kernel = np.exp(-0.5 * (np.arange(-60, 61) / 20) ** 2)
    duplicate = np.convolve(genuine / genuine.sum(), kernel / kernel.sum(), "same")
    total = max(float(counts.sum()), MIN_RATE)
    share = max_share / 2
    probability = np.ones(len(counts))
    for _ in range(100):
        probability = share * duplicate / (share * duplicate + (1 - share) * impostor)
        share = min(max_share, float(counts @ probability) / total)
    # The weights stay positive, since a gallery may have only one pair.
    return np.maximum(1 - probability, 1e-9)

"""False match rate of one gallery, estimated from its own impostor pairs and the pack's calibration.

Any two subjects of a gallery are an impostor pair. Their similarities show how the recognizer treats the photos of this
gallery, without any labeled probe.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np

from models.risk.calibration import MIN_RATE, Calibration, Floats, FmrCurve, Ints, Rate
from models.risk.impostor_evidence import ImpostorEvidence, PairScores
from models.risk.normal_scale import NormalFit, ScorePrior, fit_normal

MAX_DUPLICATE_SHARE: Final = 0.1
"""Largest share of subjects that are treated as duplicates of another subject."""
DUPLICATE_ROUNDS: Final = 2
"""Duplicates affect the fitted curve, and the curve identifies duplicates."""
MIN_DUPLICATE_CHANGE: Final = 0.1
"""Change of the number of duplicate pairs that needs another round."""
UNLIKE_FMR: Final = 0.001
UNLIKE_RATIO: Final = 3.0
"""Ratio of false match rates, beyond the interval, from which a gallery's people differ from the pack's."""
RULE_OF_THREE: Final = 3.0
"""Zero matches of n pairs are compatible with a rate up to 3 / n at 95 % confidence (J. Hanley, 1983)."""


class GalleryRisk:
    """FMR of one gallery, from its own impostor pairs and the pack's calibration.

    The gallery has the right photos but few pairs. Its scores follow a normal distribution on the scale of
    :mod:`models.risk.normal_scale`; the pack gives weak priors on the scale's power, place and width. Likely duplicates
    are removed: each score counts by the probability that its pair is an impostor pair.

    Two curves: ``curve`` of the rival-adjusted similarities, for searches, and ``raw_curve`` of the similarities.
    Without adjusted scores, ``curve`` is ``raw_curve``.

    The 95 % intervals come from the inverse Hessian of the fit and the uncertainty of the power. In simulated galleries
    of 30 to 200 people they cover the true rate in 90 to 100 % of cases. They do not cover probes unlike the gallery.

    Args:
        evidence: impostor pairs of the gallery, with at least two probes.
        pack: calibration of the pack; None uses the gallery alone.

    Raises:
        ValueError: the evidence has fewer than two probes or no pairs.
    """

    def __init__(self, evidence: ImpostorEvidence, pack: Calibration | None) -> None:
        if evidence.probes < 2 or not evidence.raw.counts.sum():
            raise ValueError("a gallery risk needs at least two subjects")
        self.evidence = evidence
        self.pack = pack
        self._prior = None
        if pack is not None:
            self._prior = ScorePrior.of(pack.curve.rates, pack.impostor_pairs)
        self._fit, self.duplicate_pairs = self._fitted(evidence.adjusted or evidence.raw)
        self.curve = self._fit.curve

    @cached_property
    def raw_curve(self) -> FmrCurve:
        """Curve of the similarities without adjustment, for verification and FMR targets."""
        return self.curve if self.evidence.adjusted is None else self._fitted(self.evidence.raw)[0].curve

    @property
    def gallery_share(self) -> float:
        """Share of the estimate that the gallery's own scores determine; the rest is the pack's prior."""
        return 1.0 if self.pack is None else self._fit.own_share

    @property
    def min_fmr(self) -> float:
        """Smallest FMR that the pairs of gallery and pack support by counting."""
        return min_supported_fmr(self.evidence.pairs + (0 if self.pack is None else self.pack.impostor_pairs))

    def fmr_over_pack(self) -> Rate | None:
        """Return the ratio of the gallery's FMR to the pack's, where the pack's is UNLIKE_FMR; None without a pack."""
        if self._prior is None:
            return None
        rate = self.raw_curve.fmr(self._prior.similarity_at(UNLIKE_FMR))
        return Rate(rate.value / UNLIKE_FMR, rate.extrapolated, rate.low / UNLIKE_FMR, rate.high / UNLIKE_FMR)

    def is_unlike_pack(self) -> bool:
        """Return whether strangers match UNLIKE_RATIO times as often, or as rarely, as in the pack's calibration."""
        ratio = self.fmr_over_pack()
        return ratio is not None and (ratio.low > UNLIKE_RATIO or ratio.high < 1 / UNLIKE_RATIO)

    def _fitted(self, scores: PairScores) -> tuple[NormalFit, float]:
        """Return the fit to scores, and the number of duplicate pairs that it leaves out."""
        probes, subjects = self.evidence.probes, self.evidence.subjects
        counts = scores.counts / scores.counts.sum() * self.evidence.pairs
        variance = scores.variance(probes, subjects)
        impostors, duplicates = counts, 0.0
        for _ in range(DUPLICATE_ROUNDS):
            if self.pack is None:
                break
            rates = fit_normal(impostors, variance, probes, self._prior, intervals=False).curve.rates
            impostors = _weight_impostors(counts, rates, self.pack.genuine, subjects)
            before, duplicates = duplicates, float(counts.sum() - impostors.sum())
            if abs(duplicates - before) < MIN_DUPLICATE_CHANGE:
                break
        return fit_normal(impostors, variance, probes, self._prior), duplicates


def min_supported_fmr(pairs: int) -> float:
    """Return the smallest FMR that can be claimed after so many pairs without a match."""
    return RULE_OF_THREE / pairs


def _weight_impostors(counts: Floats, rates: Floats, genuine: Ints, subjects: int) -> Floats:
    """Return the counts, weighted by the probability that a pair of the bin is an impostor pair."""
    return counts * impostor_probability(counts, rates, genuine, MAX_DUPLICATE_SHARE * subjects / float(counts.sum()))


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
    total = float(counts.sum())
    share = max_share / 2
    probability = np.ones(len(counts))
    for _ in range(100):
        probability = share * duplicate / (share * duplicate + (1 - share) * impostor)
        share = min(max_share, float(counts @ probability) / total)
    # The weights stay positive, since a gallery may have only one pair.
    return np.maximum(1 - probability, 1e-9)

"""False match rate of one gallery, estimated from its own impostor pairs and the pack's calibration.

Any two subjects of a gallery are an impostor pair. Their similarities show how the recognizer treats the photos of this
gallery, without any labeled probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from models.risk.calibration import (
    BIN_COUNT,
    BIN_WIDTH,
    EDGES,
    MIN_RATE,
    MIN_SUPPORT,
    Calibration,
    FmrCurve,
    Ints,
    Rate,
    Threshold,
    count_at_or_above,
    tail_variance,
)
from models.risk.tails import Floats, fit_tail

PACK_PRIOR_PAIRS: Final = 100_000
"""Weight of the pack's tail, in pairs of the gallery."""
SHIFT_PRIOR_STD: Final = 0.3
"""Prior standard deviation of the gallery's median from the pack's, in units of the pack's spread."""
STRETCH_PRIOR_STD: Final = 0.2
"""Prior standard deviation of the ratio of the gallery's spread to the pack's."""
MIN_STRETCH: Final = 0.5
"""Lower bound of that ratio, since vectors that are not faces may hardly differ and would lower the threshold."""
MEDIAN_LEVEL: Final = 0.5
SHOULDER_LEVEL: Final = 0.02
"""Share of pairs above the upper of the two quantiles that align the pack's curve with the gallery's."""
MIN_SHOULDER_PAIRS: Final = 10
"""Minimum pairs above the upper quantile, which is lower in small galleries."""
MAX_TAIL_PAIRS: Final = 1000
"""Maximum pairs in the fit of the gallery's tail: tails are closer to a Pareto distribution further out."""
MIN_SHAPE: Final = -0.3
"""Lower bound of the shape of the gallery's tail, which may end since the pack's does not."""
DENSITY_STEP: Final = 0.01
PRIOR_PEOPLE: Final = 2
"""Weight, in people, of the prior that pairs are independent, in the estimate of the variance between people."""
MAX_DUPLICATE_SHARE: Final = 0.1
"""Largest share of subjects that are treated as duplicates of another subject."""


@dataclass(frozen=True, eq=False)
class ImpostorEvidence:
    """Similarities between subjects of one gallery under its fusion.

    One photo of each of some subjects is compared, as a probe, with every other subject.

    Args:
        counts: (2000,) histogram of all similarities.
        squares: (2001,) sum over probes of the squared number of similarities at or above each of EDGES.
        best: (2000,) histogram of each probe's largest similarity, the result of a non-mated search.
        probes: number of probes.
        subjects: number of subjects in the gallery.
    """

    counts: Ints
    squares: Floats
    best: Ints
    probes: int
    subjects: int

    @property
    def pairs(self) -> int:
        """Distinct pairs of subjects. If all subjects are probes, ``counts`` holds each pair twice."""
        compared = int(self.counts.sum())
        return compared // 2 if self.probes == self.subjects else compared

    def variance(self) -> Floats:
        """Return the (2001,) variances, over the choice of people, of the share of similarities above each of EDGES.

        Pairs depend on both of their people. The variance is 4 / n times the variance between the shares of people,
        minus the part due to single pairs (W. Hoeffding, 1948, U-statistic of order 2).
        """
        n, others = self.probes, self.subjects - 1
        share = count_at_or_above(self.counts) / max(1, n * others)
        between_people = np.maximum(0.0, self.squares / n / others**2 - share**2)
        single = share * (1 - share) / (n * others)
        return np.asarray(np.maximum(4 * between_people / n - 2 * single, 2 * single))

    def document(self) -> dict[str, Any]:
        """Return a JSON document, with histograms trimmed to their nonzero range."""
        return {
            "counts": _sparse(self.counts),
            "squares": [round(v) for v in self.squares],
            "best": _sparse(self.best),
            "probes": self.probes,
            "subjects": self.subjects,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ImpostorEvidence:
        """Parse the result of :meth:`document`."""
        return cls(
            _dense(document["counts"]),
            np.asarray(document["squares"], np.float64),
            _dense(document["best"]),
            int(document["probes"]),
            int(document["subjects"]),
        )


class GalleryRisk:
    """FMR of one gallery, from its own impostor pairs and the pack's calibration.

    The pack shows the form of the tail from millions of pairs of other photos; the gallery has the right photos but few
    pairs. Steps:

    1. Remove likely duplicates: weight each similarity by the probability that its pair is an impostor pair.
    2. Shift and stretch the pack's curve so that two quantiles match the gallery's, as far as these are known.
    3. Average both curves; the pack's counts as PACK_PRIOR_PAIRS pairs (gamma prior on the rate).

    Args:
        evidence: impostor pairs of the gallery, with at least two probes.
        pack: calibration of the pack; None uses the gallery alone.

    Raises:
        ValueError: the evidence has fewer than two probes or no pairs.
    """

    def __init__(self, evidence: ImpostorEvidence, pack: Calibration | None) -> None:
        if evidence.probes < 2 or not evidence.counts.sum():
            raise ValueError("a gallery risk needs at least two subjects")
        self.evidence = evidence
        self.duplicate_pairs = 0.0
        counts = evidence.counts / evidence.counts.sum() * evidence.pairs
        variance = evidence.variance()
        if pack is None:
            self.gallery_share = 1.0
            self.curve = _own_curve(counts, variance, min_shape=0.0)
            return
        impostors = counts
        for _ in range(2):  # duplicates affect the fitted curve, and the curve identifies duplicates
            fitted = _fit_pack_curve(pack, impostors, variance, evidence.probes)
            impostors = _weight_impostors(counts, fitted.rates, pack.genuine, evidence.subjects)
        self.duplicate_pairs = float(counts.sum() - impostors.sum())
        own = _own_curve(impostors, variance, MIN_SHAPE)
        n, m = float(impostors.sum()), float(PACK_PRIOR_PAIRS)
        self.gallery_share = n / (n + m)
        total = n * own.rates + m * fitted.rates
        from_gallery = n * own.rates / total
        variances = from_gallery**2 * own.variances + (1 - from_gallery) ** 2 * fitted.variances
        self.curve = FmrCurve(total / (n + m), variances, max(own.last_counted, fitted.last_counted))

    def fmr(self, t: float) -> Rate:
        """Return FMR(t) of one comparison with a subject, non-increasing in t."""
        return self.curve.fmr(t)

    def threshold_at_fmr(self, rate: float) -> Threshold:
        """Return the threshold for an FMR; see :meth:`FmrCurve.threshold_at_fmr`."""
        return self.curve.threshold_at_fmr(rate)


def _own_curve(counts: Floats, variance: Floats, min_shape: float) -> FmrCurve:
    """Return the gallery's own curve: counted at low similarities, fitted in the tail."""
    pairs_above = count_at_or_above(counts)
    total = float(pairs_above[0])
    row = int(np.flatnonzero(pairs_above >= min(MAX_TAIL_PAIRS, SHOULDER_LEVEL * total))[-1])
    share, start = float(pairs_above[row]) / total, float(EDGES[row])
    excesses, filled = EDGES[row:-1] + BIN_WIDTH / 2 - start, counts[row:] > 0
    tail = fit_tail(excesses[filled], counts[row:][filled], start, share, min_shape)
    counted = np.arange(len(EDGES)) <= row
    at_start = float(variance[row]) / share**2
    relative = np.where(counted, variance / np.maximum(pairs_above / total, share) ** 2, at_start)
    beyond = tail_variance(EDGES, start, tail.scale, 1 / max(at_start, 1e-12))
    rates = np.where(counted, pairs_above / total, tail.exceedances(EDGES))
    supported = np.flatnonzero(pairs_above >= MIN_SUPPORT)
    return FmrCurve(
        rates, relative + np.where(counted, 0.0, beyond), float(EDGES[supported[-1]]) if len(supported) else -1
    )


def _fit_pack_curve(pack: Calibration, counts: Floats, variance: Floats, probes: int) -> FmrCurve:
    """Shift and stretch the pack's curve to the gallery's median and upper quantile.

    Both are Bayesian estimates: measurement errors are weighed against the usual differences between galleries and
    packs.
    """
    total = float(counts.sum())
    shares, shoulder_level = (
        count_at_or_above(counts) / total,
        min(0.25, max(SHOULDER_LEVEL, MIN_SHOULDER_PAIRS / total)),
    )
    pack_median, pack_shoulder = (_quantile(pack.curve.rates, level) for level in (MEDIAN_LEVEL, shoulder_level))
    (own_median, median_error2), (own_shoulder, shoulder_error2) = (
        _measure_quantile(shares, variance, level, probes, pack) for level in (MEDIAN_LEVEL, shoulder_level)
    )
    spread = pack_shoulder - pack_median
    median, median_error2 = _posterior(pack_median, own_median, median_error2, SHIFT_PRIOR_STD * spread)
    stretch_error2 = (median_error2 + shoulder_error2) / spread**2
    stretch, stretch_error2 = _posterior(1.0, (own_shoulder - own_median) / spread, stretch_error2, STRETCH_PRIOR_STD)
    stretch = max(stretch, MIN_STRETCH)
    source = pack_median + (EDGES - median) / stretch
    logs = np.interp(source, EDGES, np.log(pack.curve.rates))
    # Extrapolate the pack's curve beyond its last edge with its final slope.
    slope = (np.log(pack.curve.rates[-1]) - np.log(pack.curve.rates[-51])) / (EDGES[-1] - EDGES[-51])
    logs = np.where(source > 1, logs + slope * (source - 1), logs)
    error2 = median_error2 + stretch_error2 * (source - pack_median) ** 2
    variances = np.interp(source, EDGES, pack.curve.variances) + np.gradient(logs, EDGES) ** 2 * error2
    return FmrCurve(np.exp(logs), variances, median + (pack.curve.last_counted - pack_median) * stretch)


def _measure_quantile(
    shares: Floats, variance: Floats, level: float, probes: int, pack: Calibration
) -> tuple[float, float]:
    """Return the gallery's quantile for ``level`` and its squared standard error, with the density of the pack."""
    own, theirs = _quantile(shares, level), _quantile(pack.curve.rates, level)
    # Few people do not show the variance between people. The prior counts only disjoint pairs as independent.
    disjoint = level * (1 - level) * 2 / probes
    share_variance = (probes * float(np.interp(own, EDGES, variance)) + PRIOR_PEOPLE * disjoint) / (
        probes + PRIOR_PEOPLE
    )
    below, beyond = np.interp([theirs - DENSITY_STEP, theirs + DENSITY_STEP], EDGES, pack.curve.rates)
    density = float(below - beyond) / (2 * DENSITY_STEP)
    return own, share_variance / density**2


def _posterior(mean: float, measured: float, error2: float, std: float) -> tuple[float, float]:
    """Return mean and variance of a normal prior (``mean``, ``std``) after a measurement with variance ``error2``."""
    gain = std**2 / (std**2 + error2)
    return mean + gain * (measured - mean), gain * error2


def _quantile(shares: Floats, level: float) -> float:
    """Return the similarity at which the non-increasing ``shares`` at EDGES fall to ``level``."""
    return float(np.interp(-level, -shares, EDGES))


def _weight_impostors(counts: Floats, rates: Floats, genuine: Ints, subjects: int) -> Floats:
    """Return the counts, weighted by the probability that a pair of the bin is an impostor pair.

    Expectation maximization over the share of duplicate pairs, whose similarities follow the pack's genuine pairs.
    """
    impostor = np.maximum(rates[:-1] - rates[1:], MIN_RATE)
    kernel = np.exp(-0.5 * (np.arange(-60, 61) / 20) ** 2)
    duplicate = np.convolve(genuine / genuine.sum(), kernel / kernel.sum(), "same")
    total = float(counts.sum())
    max_share = MAX_DUPLICATE_SHARE * subjects / total
    share = max_share / 2
    probability = np.ones(len(counts))
    for _ in range(100):
        probability = share * duplicate / (share * duplicate + (1 - share) * impostor)
        share = min(max_share, float(counts @ probability) / total)
    # The weights stay positive, since a gallery may have only one pair.
    return np.asarray(counts * np.maximum(1 - probability, 1e-9))


def _sparse(counts: Ints) -> dict[str, Any]:
    rows = np.flatnonzero(counts)
    first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    return {"first": first, "counts": counts[first:last].tolist()}


def _dense(document: Mapping[str, Any]) -> Ints:
    counts = np.zeros(BIN_COUNT, np.int64)
    counts[document["first"] : document["first"] + len(document["counts"])] = document["counts"]
    return counts

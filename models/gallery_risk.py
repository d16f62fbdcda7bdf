"""The risk of one gallery, from its own strangers and the pack's. Pure.

Every two subjects of a gallery are strangers to each other: their similarities say what this recogniser makes of this
gallery's photos, without one labelled probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from models.risk import (
    BIN_COUNT,
    BIN_WIDTH,
    EDGES,
    MIN_SUPPORT,
    NO_RATE,
    Calibration,
    FmrCurve,
    Ints,
    Rate,
    Threshold,
    above,
    tail_variance,
)
from models.tails import Floats, fit_tail

PACK_WORTH: Final = 100_000
"""The pack's tail counts as much as this many of the gallery's pairs."""
PACK_TRUST: Final = 0.3
"""How far the middle of a gallery's similarities is expected to lie from the pack's, in units of the pack's spread."""
STRETCH_TRUST: Final = 0.2
"""How much wider or narrower a gallery's similarities are expected to lie than the pack's."""
LEAST_STRETCH: Final = 0.5
"""Vectors that are no faces' may hardly differ; a threshold must not fall for that."""
BODY: Final = 0.5
SHOULDER: Final = 0.02
"""The shares of pairs at or above the two similarities by which the pack's curve is moved onto the gallery's."""
SHOULDER_PAIRS: Final = 10
"""In a small gallery the shoulder lies lower, so that as many pairs lie beyond it."""
FITTED_PAIRS: Final = 1000
"""A gallery's tail is fitted to this many of its largest similarities, or to those beyond the shoulder if these are
fewer: the further out, the closer it is to a Pareto's."""
LEAST_SHAPE: Final = -0.3
"""A gallery's own tail may end where the pack's goes on."""
DENSITY_STEP: Final = 0.01
PRIOR_PEOPLE: Final = 2
"""As many people's worth of pairs are taken to be independent, when it is judged how much people differ."""
MAX_DUPLICATES: Final = 0.1
"""Of subjects, who may be somebody else's duplicate and are still told from strangers."""


@dataclass(frozen=True, eq=False)
class ImpostorEvidence:
    """A gallery's own strangers: of some of its subjects one photo each, compared with every other subject as a probe
    would be, under the gallery's fusion.

    counts: (2000,) of these similarities; squares: (2001,) for each of EDGES the sum over probes of the squared number
    of its similarities at or above it; best: (2000,) counts of each probe's largest similarity, which is what a
    stranger's search of this gallery, less one, would have returned; subjects: in the gallery.
    """

    counts: Ints
    squares: Floats
    best: Ints
    probes: int
    subjects: int

    @property
    def pairs(self) -> int:
        """Distinct pairs of subjects; where all subjects are probes, each pair was counted twice."""
        compared = int(self.counts.sum())
        return compared // 2 if self.probes == self.subjects else compared

    def variance(self) -> Floats:
        """(2001,) of the share of similarities at or above each of EDGES, over the choice of people.

        A pair's similarity depends on both its people: 4 / n times the variance of one person's share, less what pairs
        drawn singly add to that (W. Hoeffding, 1948, for a U-statistic of order 2).
        """
        n, others = self.probes, self.subjects - 1
        share = above(self.counts) / max(1, n * others)
        person = np.maximum(0.0, self.squares / n / others**2 - share**2)
        single = share * (1 - share) / (n * others)
        return np.asarray(np.maximum(4 * person / n - 2 * single, 2 * single))

    def document(self) -> dict[str, Any]:
        """JSON-ready: histograms from their first to their last entry that is not zero."""
        return {
            "counts": _sparse(self.counts),
            "squares": [round(v) for v in self.squares],
            "best": _sparse(self.best),
            "probes": self.probes,
            "subjects": self.subjects,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ImpostorEvidence:
        return cls(
            _dense(document["counts"]),
            np.asarray(document["squares"], np.float64),
            _dense(document["best"]),
            int(document["probes"]),
            int(document["subjects"]),
        )


class GalleryRisk:
    """FMR of one gallery, from its own strangers and the pack's.

    The pack knows the form of the tail from millions of pairs, but of other photos; the gallery has the right photos,
    but few pairs. So the pack's curve is moved and stretched until its middle and its shoulder lie where the gallery's
    do (as far as the gallery's are known), and then counts as 100,000 of the gallery's pairs (a gamma prior on the
    rate). What looks like the same person under two names is taken out of the gallery's counts first: each similarity
    counts by how probable it is a stranger's, the pack's genuine pairs being what duplicates look like.

    Args:
        evidence: of the gallery; at least two subjects.
        pack: None: the gallery stands alone.
    """

    def __init__(self, evidence: ImpostorEvidence, pack: Calibration | None) -> None:
        if evidence.probes < 2 or not evidence.counts.sum():
            raise ValueError("a gallery's strangers need two subjects at least")
        self.evidence = evidence
        self.duplicate_pairs = 0.0
        counts = evidence.counts / evidence.counts.sum() * evidence.pairs
        variance = evidence.variance()
        if pack is None:
            self.gallery_share = 1.0
            self.curve = _own_curve(counts, variance, least_shape=0.0)
            return
        strangers = counts
        for _ in range(2):  # duplicates are told by the moved curve, which few pairs lets them move
            moved = _moved(pack, strangers, variance, evidence.probes)
            strangers = _strangers(counts, moved.rates, pack.genuine, evidence.subjects)
        self.duplicate_pairs = float(counts.sum() - strangers.sum())
        own = _own_curve(strangers, variance, LEAST_SHAPE)
        n, m = float(strangers.sum()), float(PACK_WORTH)
        self.gallery_share = n / (n + m)
        total = n * own.rates + m * moved.rates
        from_gallery = n * own.rates / total
        variances = from_gallery**2 * own.variances + (1 - from_gallery) ** 2 * moved.variances
        self.curve = FmrCurve(total / (n + m), variances, max(own.counted_to, moved.counted_to))

    def fmr(self, t: float) -> Rate:
        """FMR(t) of one comparison with a subject, monotone in t."""
        return self.curve.fmr(t)

    def threshold_at_fmr(self, rate: float) -> Threshold:
        """As of :meth:`FmrCurve.threshold_at_fmr`."""
        return self.curve.threshold_at_fmr(rate)


def _own_curve(counts: Floats, variance: Floats, least_shape: float) -> FmrCurve:
    """Counted up to the shoulder, fitted beyond."""
    pairs_above = above(counts)
    total = float(pairs_above[0])
    row = int(np.flatnonzero(pairs_above >= min(FITTED_PAIRS, SHOULDER * total))[-1])
    share, start = float(pairs_above[row]) / total, float(EDGES[row])
    x, some = EDGES[row:-1] + BIN_WIDTH / 2 - start, counts[row:] > 0
    tail = fit_tail(x[some], counts[row:][some], start, share, least_shape)
    counted = np.arange(len(EDGES)) <= row
    at_start = float(variance[row]) / share**2
    relative = np.where(counted, variance / np.maximum(pairs_above / total, share) ** 2, at_start)
    beyond = tail_variance(EDGES, start, tail.scale, 1 / max(at_start, 1e-12))
    rates = np.where(counted, pairs_above / total, tail.exceedances(EDGES))
    supported = np.flatnonzero(pairs_above >= MIN_SUPPORT)
    return FmrCurve(
        rates, relative + np.where(counted, 0.0, beyond), float(EDGES[supported[-1]]) if len(supported) else -1
    )


def _moved(pack: Calibration, counts: Floats, variance: Floats, probes: int) -> FmrCurve:
    """The pack's curve, moved and stretched to lie upon the gallery's middle and shoulder; each is believed by how well
    it is known, against how far galleries lie from packs."""
    total = float(counts.sum())
    shares, shoulder_level = above(counts) / total, min(0.25, max(SHOULDER, SHOULDER_PAIRS / total))
    pack_body, pack_shoulder = (_quantile(pack.curve.rates, level) for level in (BODY, shoulder_level))
    (own_body, body_error2), (own_shoulder, shoulder_error2) = (
        _measured(shares, variance, level, probes, pack) for level in (BODY, shoulder_level)
    )
    spread = pack_shoulder - pack_body
    body, body_error2 = _believed(pack_body, own_body, body_error2, PACK_TRUST * spread)
    stretch_error2 = (body_error2 + shoulder_error2) / spread**2
    stretch, stretch_error2 = _believed(1.0, (own_shoulder - own_body) / spread, stretch_error2, STRETCH_TRUST)
    stretch = max(stretch, LEAST_STRETCH)
    source = pack_body + (EDGES - body) / stretch
    logs = np.interp(source, EDGES, np.log(pack.curve.rates))
    # Beyond the pack's last edge its curve goes on as it ended.
    slope = (np.log(pack.curve.rates[-1]) - np.log(pack.curve.rates[-51])) / (EDGES[-1] - EDGES[-51])
    logs = np.where(source > 1, logs + slope * (source - 1), logs)
    moved_error2 = body_error2 + stretch_error2 * (source - pack_body) ** 2
    variances = np.interp(source, EDGES, pack.curve.variances) + np.gradient(logs, EDGES) ** 2 * moved_error2
    return FmrCurve(np.exp(logs), variances, body + (pack.curve.counted_to - pack_body) * stretch)


def _measured(shares: Floats, variance: Floats, level: float, probes: int, pack: Calibration) -> tuple[float, float]:
    """Where a gallery's shares fall to ``level``, and the square of that similarity's standard error, for which the
    density is the pack's: a small gallery has none."""
    found, theirs = _quantile(shares, level), _quantile(pack.curve.rates, level)
    # A handful of people do not tell how much people differ: to begin with, only pairs without a person in common are
    # taken to be independent.
    disjoint = level * (1 - level) * 2 / probes
    share_variance = (probes * float(np.interp(found, EDGES, variance)) + PRIOR_PEOPLE * disjoint) / (
        probes + PRIOR_PEOPLE
    )
    below, beyond = np.interp([theirs - DENSITY_STEP, theirs + DENSITY_STEP], EDGES, pack.curve.rates)
    density = float(below - beyond) / (2 * DENSITY_STEP)
    return found, share_variance / density**2


def _believed(expected: float, found: float, error2: float, spread: float) -> tuple[float, float]:
    """What to believe of something expected with a standard deviation ``spread`` and then found with an error, both
    normal: value and squared error."""
    trust = spread**2 / (spread**2 + error2)
    return expected + trust * (found - expected), trust * error2


def _quantile(shares: Floats, level: float) -> float:
    """Where shares (at EDGES, never rising) fall to ``level``."""
    return float(np.interp(-level, -shares, EDGES))


def _strangers(counts: Floats, moved: Floats, genuine: Ints, subjects: int) -> Floats:
    """Each bin's counts times the probability that its pairs are strangers, by expectation and maximisation over the
    share of pairs that are one person's."""
    strange = np.maximum(moved[:-1] - moved[1:], NO_RATE)
    kernel = np.exp(-0.5 * (np.arange(-60, 61) / 20) ** 2)
    same = np.convolve(genuine / genuine.sum(), kernel / kernel.sum(), "same")
    total = float(counts.sum())
    largest = MAX_DUPLICATES * subjects / total
    share = largest / 2
    probable = np.ones(len(counts))
    for _ in range(100):
        probable = share * same / (share * same + (1 - share) * strange)
        share = min(largest, float(counts @ probable) / total)
    # Some doubt is left of the surest duplicate: two subjects may be all there is to go by.
    return np.asarray(counts * np.maximum(1 - probable, 1e-9))


def _sparse(counts: Ints) -> dict[str, Any]:
    rows = np.flatnonzero(counts)
    first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    return {"first": first, "counts": counts[first:last].tolist()}


def _dense(document: Mapping[str, Any]) -> Ints:
    found = np.zeros(BIN_COUNT, np.int64)
    found[document["first"] : document["first"] + len(document["counts"])] = document["counts"]
    return found

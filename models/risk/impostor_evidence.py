"""Similarities between the subjects of one gallery: the evidence for its false match rate and its misses.

Identification compares the rival-adjusted similarity s' = s1 - rival_shift(s2, rival) with a threshold: s1 is the
similarity of the best subject, s2 that of the runner-up, and ``rival`` the gallery's usual best similarity of a
non-mated search. A probe that resembles many people thereby needs a higher similarity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.risk.calibration import (
    BIN_COUNT,
    BIN_WIDTH,
    EDGES,
    Floats,
    Ints,
    bin_indices,
    count_at_or_above,
    histogram,
)

Counts = NDArray[np.integer[Any]]
Similarity = TypeVar("Similarity", float, Floats)
RIVAL_WEIGHT: Final = 0.25
"""Weight of the runner-up's similarity, chosen on other photos than the tests' (docs/decisions.md, 16)."""
MIN_ADJUSTED_SUBJECTS: Final = 10
"""Subjects below which the rival is unknown: a person enrolled twice would set the median of the best similarities."""


def rival_shift(runner_up: Similarity, rival: float) -> Similarity:
    """Return how far a runner-up lowers the score of the best subject, or raises its threshold."""
    return RIVAL_WEIGHT * (runner_up - rival)


def rival_adjusted(similarities: Sequence[float], rival: float | None) -> list[float]:
    """Return the rival-adjusted similarities of one search, at most 1.

    Args:
        similarities: best first. Each is adjusted by the best of the others.
        rival: usual best similarity of a non-mated search; None leaves the similarities as they are.
    """
    if rival is None or len(similarities) < 2:
        return list(similarities)
    best, second = similarities[:2]
    adjusted = [best - rival_shift(second, rival)]
    adjusted += [similarity - rival_shift(best, rival) for similarity in similarities[1:]]
    return [min(1.0, score) for score in adjusted]


@dataclass(frozen=True, eq=False)
class PairScores:
    """Scores of probes against all other subjects.

    Args:
        counts: (2000,) histogram of all scores.
        squares: (2001,) sum over probes of the squared number of scores at or above each of EDGES.
        best: (2000,) histogram of each probe's largest score, the result of a non-mated search.
    """

    counts: Ints
    squares: Floats
    best: Ints

    @classmethod
    def of(cls, histograms: Counts, best: Floats) -> Self:
        """Summarize (q, 2000) histograms of probes, and their (q,) largest scores."""
        squares = np.zeros(len(EDGES))
        for row in histograms:
            squares += count_at_or_above(row) ** 2
        return cls(histograms.sum(0, dtype=np.int64), squares, histogram(best))

    def variance(self, probes: int, subjects: int) -> Floats:
        """Return the (2001,) variances, over the choice of people, of the share of scores above each of EDGES.

        Pairs depend on both of their people. The variance is 4 / n times the variance between the shares of people,
        minus the part due to single pairs (W. Hoeffding, 1948, U-statistic of order 2).
        """
        n, others = probes, subjects - 1
        share = count_at_or_above(self.counts) / max(1, n * others)
        between_people = np.maximum(0.0, self.squares / n / others**2 - share**2)
        single = share * (1 - share) / (n * others)
        return np.asarray(np.maximum(4 * between_people / n - 2 * single, 2 * single))

    def document(self) -> dict[str, Any]:
        """Return a JSON document, with histograms trimmed to their nonzero range."""
        squares = [round(v) for v in self.squares]
        return {"counts": _sparse(self.counts), "squares": squares, "best": _sparse(self.best)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Parse the result of :meth:`document`."""
        squares = np.asarray(document["squares"], np.float64)
        return cls(_dense(document["counts"]), squares, _dense(document["best"]))


@dataclass(frozen=True, eq=False)
class GenuineScores:
    """One template of each sampled subject with several templates, searched among the subject's other templates.

    Args:
        scores: (2000,) histogram of s' of the own subject, with all its templates; 0 if another subject is first.
        runners_up: (2000,) histogram of s' of the runner-up in the searches whose own subject is first.
        single: (2000,) histogram of the mean similarity to the subject's other single templates.
        people: number of these subjects.
    """

    scores: Ints
    runners_up: Ints
    single: Ints
    people: int

    def document(self) -> dict[str, Any]:
        histograms = {name: _sparse(getattr(self, name)) for name in ("scores", "runners_up", "single")}
        return {**histograms, "people": self.people}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        scores, runners_up, single = (_dense(document[name]) for name in ("scores", "runners_up", "single"))
        return cls(scores, runners_up, single, int(document["people"]))


@dataclass(frozen=True, eq=False)
class GenuineProbes:
    """Similarities of (q,) probes to their own subjects without the probe; NaN for subjects of one template.

    ``fused`` is the similarity to their weighted mean, ``single`` the mean over the subject's other templates.
    """

    fused: Floats
    single: Floats
    templates: Ints

    @classmethod
    def none(cls, probes: int) -> Self:
        """Return the similarities of subjects with one template each."""
        unknown = np.full(probes, np.nan)
        return cls(unknown, unknown, np.ones(probes, np.int64))


@dataclass(frozen=True, eq=False)
class ImpostorEvidence:
    """Similarities between subjects of one gallery.

    One photo of each of some subjects is compared, as a probe, with every other subject.

    Args:
        raw: similarities, for 1:1 verification and FMR targets.
        adjusted: rival-adjusted similarities, for identification; None below MIN_ADJUSTED_SUBJECTS subjects.
        rival: median of the probes' largest similarities.
        genuine: scores of the probes in their own subjects, None without ``adjusted``.
        probes: number of probes.
        subjects: number of subjects in the gallery.
        templates: number of templates.
    """

    raw: PairScores
    adjusted: PairScores | None
    rival: float | None
    genuine: GenuineScores | None
    probes: int
    subjects: int
    templates: int

    @classmethod
    def of(
        cls,
        histograms: Counts,
        nearest: Floats,
        subjects: int,
        templates: int,
        genuine: GenuineProbes | None = None,
    ) -> Self:
        """Summarize the searches.

        Args:
            histograms: (q, 2000) similarities of each probe to all subjects but its own.
            nearest: (q, 2) two largest of these similarities, descending.
        """
        raw = PairScores.of(histograms, nearest[:, 0])
        if subjects < MIN_ADJUSTED_SUBJECTS:
            return cls(raw, None, None, None, len(nearest), subjects, templates)
        rival = float(np.median(nearest[:, 0]))
        adjusted = nearest[:, 0] - rival_shift(nearest[:, 1], rival)
        pairs = PairScores.of(_adjusted_histograms(histograms, nearest[:, 0], adjusted, rival), adjusted)
        own = _genuine_scores(genuine or GenuineProbes.none(len(nearest)), nearest[:, 0], rival)
        return cls(raw, pairs, rival, own, len(nearest), subjects, templates)

    @property
    def pairs(self) -> int:
        """Distinct pairs of subjects. If all subjects are probes, histograms hold each pair twice."""
        compared = int(self.raw.counts.sum())
        return compared // 2 if self.probes == self.subjects else compared

    @property
    def mean_templates(self) -> float:
        """Mean number of templates in the vector of a subject."""
        return max(1.0, self.templates / max(1, self.subjects))

    def document(self) -> dict[str, Any]:
        """Return a JSON document."""
        document = {**self.raw.document(), "probes": self.probes, "subjects": self.subjects}
        if self.adjusted is not None and self.genuine is not None:
            document["adjusted"] = {**self.adjusted.document(), "rival": self.rival}
            document["genuine"] = self.genuine.document()
        return {**document, "templates": self.templates}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Parse the result of :meth:`document`."""
        adjusted, genuine, rival = None, None, None
        if "adjusted" in document:
            adjusted = PairScores.from_document(document["adjusted"])
            genuine = GenuineScores.from_document(document["genuine"])
            rival = float(document["adjusted"]["rival"])
        probes, subjects = int(document["probes"]), int(document["subjects"])
        templates = int(document["templates"])
        return cls(PairScores.from_document(document), adjusted, rival, genuine, probes, subjects, templates)


def _adjusted_histograms(histograms: Counts, best: Floats, adjusted: Floats, rival: float) -> Counts:
    """Return the histograms of s'. All scores of a probe but the best move by the same number of bins."""
    moved = np.zeros_like(histograms)
    shifts = np.rint(rival_shift(best, rival) / BIN_WIDTH).astype(np.int64)
    rows = zip(histograms, moved, shifts.tolist(), bin_indices(best), bin_indices(adjusted), strict=True)
    for source, target, shift, old, new in rows:
        if shift >= 0:
            target[: BIN_COUNT - shift] = source[shift:]
            target[0] += source[:shift].sum()
        else:
            target[-shift:] = source[:shift]
            target[-1] += source[shift:].sum()
        target[min(max(old - shift, 0), BIN_COUNT - 1)] -= 1
        target[new] += 1
    return moved


def _genuine_scores(probes: GenuineProbes, others: Floats, rival: float) -> GenuineScores:
    """Return the scores in the own subjects, which lack the probe's own template."""
    several = np.flatnonzero(probes.templates > 1)
    fused, single, best_other = probes.fused[several], probes.single[several], others[several]
    first = fused > best_other
    scores = np.where(first, fused - rival_shift(best_other, rival), -1.0)
    runners_up = (best_other - rival_shift(fused, rival))[first]
    return GenuineScores(histogram(scores), histogram(runners_up), histogram(single), len(several))


def _sparse(counts: Ints) -> dict[str, Any]:
    rows = np.flatnonzero(counts)
    first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    return {"first": first, "counts": counts[first:last].tolist()}


def _dense(document: Mapping[str, Any]) -> Ints:
    counts = np.zeros(BIN_COUNT, np.int64)
    counts[document["first"] : document["first"] + len(document["counts"])] = document["counts"]
    return counts

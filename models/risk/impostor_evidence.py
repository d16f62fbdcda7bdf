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

from models.risk.calibration import BIN_COUNT, Floats, Ints, histogram

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
        pairs: (2000,) histogram of all similarities, for 1:1 verification and FMR targets.
        best: (2000,) histogram of each probe's largest rival-adjusted similarity, the result of a non-mated search; of
            the largest similarity below MIN_ADJUSTED_SUBJECTS subjects.
        rival: median of the probes' largest similarities; None below MIN_ADJUSTED_SUBJECTS subjects.
        genuine: scores of the probes in their own subjects, None without ``rival``.
        probes: number of probes.
        subjects: number of subjects in the gallery.
        templates: number of templates.
    """

    pairs: Ints
    best: Ints
    rival: float | None
    genuine: GenuineScores | None
    probes: int
    subjects: int
    templates: int

    @classmethod
    def of(
        cls, pairs: Ints, nearest: Floats, subjects: int, templates: int, genuine: GenuineProbes | None = None
    ) -> Self:
        """Summarize the searches.

        Args:
            pairs: (2000,) histogram of the similarities of q probes to all subjects but their own.
            nearest: (q, 2) two largest of these similarities of each probe, descending.
        """
        best = nearest[:, 0]
        if subjects < MIN_ADJUSTED_SUBJECTS:
            return cls(pairs, histogram(best), None, None, len(nearest), subjects, templates)
        rival = float(np.median(best))
        own = _genuine_scores(genuine or GenuineProbes.none(len(nearest)), best, rival)
        adjusted = histogram(best - rival_shift(nearest[:, 1], rival))
        return cls(pairs, adjusted, rival, own, len(nearest), subjects, templates)

    @property
    def pair_count(self) -> int:
        """Distinct pairs of subjects. If all subjects are probes, the histogram holds each pair twice."""
        compared = int(self.pairs.sum())
        return compared // 2 if self.probes == self.subjects else compared

    @property
    def mean_templates(self) -> float:
        """Mean number of templates in the vector of a subject."""
        return max(1.0, self.templates / max(1, self.subjects))

    def document(self) -> dict[str, Any]:
        """Return a JSON document, with histograms trimmed to their nonzero range."""
        genuine = None if self.genuine is None else self.genuine.document()
        known = {name: getattr(self, name) for name in ("rival", "probes", "subjects", "templates")}
        return {"pairs": _sparse(self.pairs), "best": _sparse(self.best), "genuine": genuine, **known}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Parse the result of :meth:`document`."""
        genuine = None if document["genuine"] is None else GenuineScores.from_document(document["genuine"])
        known = {name: document[name] for name in ("rival", "probes", "subjects", "templates")}
        return cls(_dense(document["pairs"]), _dense(document["best"]), genuine=genuine, **known)


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

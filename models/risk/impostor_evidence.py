"""Similarities between the subjects of one gallery: the evidence for its false match rate and its misses.

Identification compares a score with a threshold. The score is a similarity, adjusted in two ways:

- by the level of the subject: how much more than usual strangers resemble this person.
- by rival_shift(s2, rival): s2 is the runner-up's similarity less its level, and ``rival`` the gallery's usual best one
  of a non-mated search. A probe that resembles many people thereby needs a higher similarity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.risk.calibration import BIN_COUNT, Floats, Ints, histogram

Similarity = TypeVar("Similarity", float, Floats)
RIVAL_WEIGHT: Final = 0.25
"""Weight of the runner-up's similarity, chosen on other photos than the tests' (docs/decisions.md, 16)."""
MIN_ADJUSTED_SUBJECTS: Final = 10
"""Subjects below which rival and levels are unknown: a person enrolled twice would set the median of the best."""
RESEMBLING_SHARE: Final = 0.1
"""Share of the other subjects, the most similar ones, whose mean similarity is a level. With 0.3, the worst group of
300 adults of FairFace has 1.38 instead of 1.24 times the mean of all groups' false alarms."""
MIN_RESEMBLING: Final = 5
"""Least number of them; a level counts n / (n + MIN_RESEMBLING) among n subjects. Counted in full, galleries of 12
people with three photos let in 1.5 instead of 1.4 times 1 %."""
MOST_RESEMBLED: Final = 0.1
"""Share of subjects that are reported as most like strangers."""
LEVEL_STEP: Final = 1e-4
"""Rounding step of stored levels."""


def rival_shift(runner_up: Similarity, rival: float) -> Similarity:
    """Return how far a runner-up lowers the score of the best subject, or raises its threshold."""
    return RIVAL_WEIGHT * (runner_up - rival)


def search_scores(leveled: Sequence[float], rival: float | None) -> list[float]:
    """Return the scores of the subjects that a search found, at most 1.

    Args:
        leveled: similarities less the levels. Each is adjusted by the best of the others.
        rival: usual best similarity of a non-mated search; None leaves the similarities as they are.
    """
    if rival is None or len(leveled) < 2:
        return list(leveled)
    second, best = sorted(leveled)[-2:]
    return [min(1.0, score - rival_shift(second if score == best else best, rival)) for score in leveled]


def level_weight(subjects: int) -> float:
    """Return how much a level counts among so many subjects; 0 if levels are unknown."""
    return subjects / (subjects + MIN_RESEMBLING) if subjects >= MIN_ADJUSTED_SUBJECTS else 0.0


def resemblance(similarities: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return how similar each subject is to the probes that resemble it most.

    Args:
        similarities: (q, n) similarities of probes, -1 for a subject's own probe; q > MIN_RESEMBLING + 1.

    Returns:
        (n,) means of the RESEMBLING_SHARE largest, and (q, n) the same without the probe of the row. A probe must not
        raise the level that its own score is lowered by, since strangers raise none.
    """
    count = max(MIN_RESEMBLING, int(RESEMBLING_SHARE * (len(similarities) - 1)))
    largest = np.sort(np.partition(similarities, -count - 1, axis=0)[-count - 1 :], axis=0)
    total = largest[1:].sum(0)
    without = np.where(similarities >= largest[1], total - similarities + largest[0], total)
    return total / count, without / count


@dataclass(frozen=True, eq=False)
class Levels:
    """How much more than usual strangers resemble each subject.

    Args:
        subjects: (n,) ascending keys.
        values: (n,) levels, 0 for the median subject.
        share: expected share of the false alarms that fall to the tenth of the subjects that strangers resemble most.
    """

    subjects: Ints
    values: Floats
    share: float

    @classmethod
    def of_resemblance(
        cls, subjects: Ints, weight: float, resembling: Floats, best: Floats, resembling_best: Floats
    ) -> Self:
        """Derive the levels.

        Args:
            resembling: (n,) result of `resemblance`, times ``weight`` a level.
            best: (q,) largest score of each probe. The upper half of them are as false alarms are.
            resembling_best: (q,) result of `resemblance` for the best subject, without the probe.
        """
        alarms = best >= np.median(best)
        share = float((resembling_best[alarms] >= np.quantile(resembling, 1 - MOST_RESEMBLED)).mean())
        return cls(subjects, weight * (resembling - np.median(resembling)), share)

    def of(self, subjects: Sequence[int]) -> list[float]:
        """Return the level of each subject: 0 if it is newer than the evidence."""
        keys = np.array(subjects, np.int64)
        rows: Ints = np.minimum(np.searchsorted(self.subjects, keys), len(self.subjects) - 1)
        return [float(value) for value in np.where(self.subjects[rows] == keys, self.values[rows], 0.0)]

    @property
    def of_most_resembled(self) -> float:
        """Level from which a subject belongs to the most resembled tenth."""
        return float(np.quantile(self.values, 1 - MOST_RESEMBLED))

    def document(self) -> dict[str, Any]:
        steps = np.round(self.values / LEVEL_STEP).astype(np.int64)
        return {"subjects": self.subjects.tolist(), "steps": steps.tolist(), "share": self.share}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        values = np.array(document["steps"], np.float64) * LEVEL_STEP
        return cls(np.array(document["subjects"], np.int64), values, document["share"])


@dataclass(frozen=True, eq=False)
class GenuineScores:
    """One template of each sampled subject with several templates, searched among the subject's other templates.

    Args:
        scores: (2000,) histogram of the own subject's scores, with all its templates; -1 if another subject is first.
        runners_up: (2000,) histogram of the runner-up's scores in the searches whose own subject is first.
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

    ``leveled`` is the similarity to their weighted mean less the level, ``single`` the mean over the other templates.
    """

    leveled: Floats
    single: Floats
    templates: Ints


@dataclass(frozen=True, eq=False)
class ImpostorEvidence:
    """Similarities between subjects of one gallery.

    One photo of each of some subjects is compared, as a probe, with every other subject.

    Args:
        pairs: (2000,) histogram of all similarities, for 1:1 verification and FMR targets.
        best: (2000,) histogram of each probe's largest score, the result of a non-mated search.
        rival: median of the probes' largest similarities less levels; None below MIN_ADJUSTED_SUBJECTS subjects.
        levels: of the subjects; None below MIN_ADJUSTED_SUBJECTS subjects.
        genuine: scores of the probes in their own subjects, None without ``rival``.
        probes: number of probes.
        subjects: number of subjects in the gallery.
        templates: number of templates.
    """

    pairs: Ints
    best: Ints
    rival: float | None
    levels: Levels | None
    genuine: GenuineScores | None
    probes: int
    subjects: int
    templates: int

    @classmethod
    def of(
        cls,
        pairs: Ints,
        nearest: Floats,
        subjects: int,
        templates: int,
        genuine: GenuineProbes,
        levels: Levels | None = None,
    ) -> Self:
        """Summarize the searches.

        Args:
            pairs: (2000,) histogram of the similarities of q probes to all subjects but their own.
            nearest: (q, 2) two largest of these similarities less levels of each probe, descending.
        """
        best = nearest[:, 0]
        if subjects < MIN_ADJUSTED_SUBJECTS:
            return cls(pairs, histogram(best), None, None, None, len(nearest), subjects, templates)
        rival = float(np.median(best))
        own = _genuine_scores(genuine, best, rival)
        adjusted = histogram(best - rival_shift(nearest[:, 1], rival))
        return cls(pairs, adjusted, rival, levels, own, len(nearest), subjects, templates)

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
        genuine, levels = (None if part is None else part.document() for part in (self.genuine, self.levels))
        known = {name: getattr(self, name) for name in ("rival", "probes", "subjects", "templates")}
        return {"pairs": _sparse(self.pairs), "best": _sparse(self.best), "genuine": genuine, "levels": levels, **known}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Parse the result of :meth:`document`."""
        genuine = None if document["genuine"] is None else GenuineScores.from_document(document["genuine"])
        levels = None if document["levels"] is None else Levels.from_document(document["levels"])
        known = {name: document[name] for name in ("rival", "probes", "subjects", "templates")}
        return cls(_dense(document["pairs"]), _dense(document["best"]), levels=levels, genuine=genuine, **known)


def _genuine_scores(probes: GenuineProbes, others: Floats, rival: float) -> GenuineScores:
    """Return the scores in the own subjects, which lack the probe's own template."""
    several = np.flatnonzero(probes.templates > 1)
    leveled, single, best_other = probes.leveled[several], probes.single[several], others[several]
    first = leveled > best_other
    scores = np.where(first, leveled - rival_shift(best_other, rival), -1.0)
    runners_up = (best_other - rival_shift(leveled, rival))[first]
    return GenuineScores(histogram(scores), histogram(runners_up), histogram(single), len(several))


def _sparse(counts: Ints) -> dict[str, Any]:
    rows = np.flatnonzero(counts)
    first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    return {"first": first, "counts": counts[first:last].tolist()}


def _dense(document: Mapping[str, Any]) -> Ints:
    counts = np.zeros(BIN_COUNT, np.int64)
    counts[document["first"] : document["first"] + len(document["counts"])] = document["counts"]
    return counts

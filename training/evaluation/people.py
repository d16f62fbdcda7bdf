"""Verification and open-set identification on photos of labeled people, without lists of pairs, and the worst pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.risk.search_rates import search_gallery
from models.runtime.network import Float
from training.evaluation.metrics import (
    Floats,
    Ints,
    measure_open_set,
    resample_people,
    resampled_tar,
    tar_at_far,
)

FARS: Final = (1e-2, 1e-3, 1e-4)
FPIRS: Final = (1e-1, 1e-2)
WORST: Final = 6
"""Pairs of each kind that a picture shows."""
ROUNDS: Final = 300
"""Resamples of an interval."""
MIN_PEOPLE: Final = 5
"""People that an interval needs."""
Rate = float | tuple[float, float, float]
"""Value, or value with the bounds of its 95 % interval over people."""


@dataclass(frozen=True)
class PhotoPair:
    """Rows of two photos, and their similarity."""

    first: int
    second: int
    similarity: float


@dataclass(frozen=True)
class PeopleResult:
    """Figures of a set of people.

    Attributes:
        rates: TAR by FAR, rank-1, and FNIR by FPIR, by name.
        too_small: sentence for each rate that the set is too small for.
        mates: least similar pairs of one person, worst first.
        lookalikes: most similar pairs of different people, worst first.
    """

    people: int
    photos: int
    rates: dict[str, Rate] = field(default_factory=dict)
    too_small: tuple[str, ...] = ()
    mates: tuple[PhotoPair, ...] = ()
    lookalikes: tuple[PhotoPair, ...] = ()


def evaluate_people(vectors: Float, labels: Ints, intervals: bool = False) -> PeopleResult:
    """Compare all photos with each other, and search a gallery of half of the people.

    A rate is measured if the set could exceed it by one error: FAR 1 % needs 100 pairs of different people. In the
    search, every other person with two photos or more is enrolled with one; the further photos of these are the mated
    probes, and all photos of the others the strangers.

    Args:
        vectors: (n, d) unit vectors.
        labels: (n,) person of each.
        intervals: add 95 % intervals over people. Sets of fewer than `MIN_PEOPLE` people have none.
    """
    first, second = np.triu_indices(len(labels), 1)
    similarities = (vectors @ vectors.T)[first, second].astype(np.float64)
    same = labels[first] == labels[second]
    owners = np.column_stack([labels[first], labels[second]])
    order = np.argsort(similarities, kind="stable")

    def worst(rows: NDArray[np.intp]) -> tuple[PhotoPair, ...]:
        return tuple(PhotoPair(int(first[i]), int(second[i]), float(similarities[i])) for i in rows[:WORST])

    tar, no_tar = _verification(similarities, same, owners, intervals)
    found, no_search = _identification(vectors.astype(np.float64), labels, intervals)
    return PeopleResult(
        len(np.unique(labels)),
        len(labels),
        {**tar, **found},
        (*no_tar, *no_search),
        worst(order[same[order]]),
        worst(order[~same[order]][::-1]),
    )


def _verification(
    similarities: Floats, same: NDArray[np.bool_], owners: Ints, intervals: bool
) -> tuple[dict[str, Rate], list[str]]:
    mated, others = int(same.sum()), int((~same).sum())
    if not mated or not others:
        return {}, [f"TAR needs two photos of one person, and photos of two people: {mated} and {others} such pairs"]
    fars = [far for far in FARS if far * others >= 1]
    values = np.array([tar_at_far(similarities, same, far) for far in fars])
    measurable = intervals and len(np.unique(owners)) >= MIN_PEOPLE
    bounds = resampled_tar(similarities, same, owners, fars, ROUNDS) if measurable else None
    small = [f"TAR at FAR {far:g} needs {round(1 / far):,} pairs of different people, not {others:,}" for far in FARS]
    return _rates([f"TAR at FAR {far:g}" for far in fars], values, bounds), small[len(fars) :]


def _identification(vectors: Floats, labels: Ints, intervals: bool) -> tuple[dict[str, Rate], list[str]]:
    people, start, counts = np.unique(labels, return_index=True, return_counts=True)
    several = np.flatnonzero(counts >= 2)[::2]
    gallery, known = start[several], people[several]
    inside = np.isin(labels, known)
    probes, strangers = np.setdiff1d(np.flatnonzero(inside), gallery), np.flatnonzero(~inside)
    if not len(probes) or not len(strangers):
        return {}, [f"FNIR needs people to enroll and strangers: {len(known)} and {len(people) - len(known)}"]
    mates = np.searchsorted(known, labels[probes])
    hits, alarms = search_gallery(vectors[gallery], vectors[probes], mates, vectors[strangers])
    fpirs = tuple(fpir for fpir in FPIRS if fpir * len(alarms) >= 1)
    bounds = None
    if intervals and min(len(known), len(people) - len(known)) >= MIN_PEOPLE:
        # The kinds are drawn apart, so that neither is ever empty.
        drawn = (resample_people(labels[rows], ROUNDS, seed) for seed, rows in enumerate((probes, strangers)))
        draws = zip(*drawn, strict=True)
        rates = [measure_open_set(np.repeat(hits, m), np.repeat(alarms, s), fpirs).as_array() for m, s in draws]
        low, high = np.quantile(rates, [0.025, 0.975], 0)
        bounds = low, high
    names = ["rank-1", *(f"FNIR at FPIR {fpir:g}" for fpir in fpirs)]
    small = [
        f"FNIR at FPIR {fpir:g} needs {round(1 / fpir):,} photos of strangers, not {len(alarms):,}" for fpir in FPIRS
    ]
    return _rates(names, measure_open_set(hits, alarms, fpirs).as_array(), bounds), small[len(fpirs) :]


def _rates(names: list[str], values: Floats, bounds: tuple[Floats, Floats] | None) -> dict[str, Rate]:
    if bounds is None:
        return dict(zip(names, values.tolist(), strict=True))
    return dict(zip(names, zip(values.tolist(), bounds[0].tolist(), bounds[1].tolist(), strict=True), strict=True))

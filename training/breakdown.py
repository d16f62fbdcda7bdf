"""Where a recogniser fails: LFW's pairs split by what their photos are like, and the pairs it gets most wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from models.quality import Quality
from training.metrics import Bools, Floats, bootstrap

PARTS: Final = 3
WORST: Final = 5
FEWEST: Final = 50
"""Pairs of a kind that a rate is stated of."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Split:
    """Pairs of one kind, judged by the thresholds of their folds. ``fnmr`` of the mated, ``fmr`` of the non-mated, None
    where there are too few such pairs; ``interval``: of the accuracy, 95 % over people."""

    by: str
    part: str
    pairs: int
    accuracy: float
    interval: Interval
    fnmr: float | None
    fmr: float | None


@dataclass(frozen=True)
class WorstPairs:
    """The mated pairs least alike and the non-mated ones most alike: two files and their similarity, worst first."""

    mated: tuple[tuple[str, str, float], ...]
    non_mated: tuple[tuple[str, str, float], ...]


# What the worse photo of a pair is worse in: the name of the split, the value, and which of two values is the worse.
QUALITIES: Final[tuple[tuple[str, Callable[[Quality], float], Callable[[float, float], float]], ...]] = (
    ("distance of the eyes, px", lambda q: q.eye_distance_px, min),
    ("sharpness", lambda q: q.sharpness, min),
    ("brightness", lambda q: q.brightness, min),
    ("contrast", lambda q: q.contrast, min),
    ("yaw, absolute", lambda q: abs(q.yaw), max),
    ("quality score", lambda q: q.score, min),
)


def splits(
    called_same: Bools,
    same: Bools,
    first: Sequence[str],
    second: Sequence[str],
    quality_of: Mapping[str, Quality],
    photos_of: Counter[str],
    fewest: int = FEWEST,
) -> list[Split]:
    """Thirds of the pairs by the worse photo of each, in every quality, and parts by how many photos LFW has of the
    less photographed person.

    Args:
        called_same: (P,) what was decided.
        same: (P,) what is true.
        first, second: (P,) files, ``Person/photo``.
        quality_of: photos without a face are absent; their pairs are in no third.
        photos_of: photos by person.
        fewest: mated, or non-mated, pairs of which a rate is stated.
    """
    people = np.array([file.split("/")[0] for file in first])
    right = called_same == same

    def split(by: str, part: str, chosen: Bools) -> Split:
        rows = np.flatnonzero(chosen)
        low, high = bootstrap(lambda drawn: np.array([right[rows[drawn]].mean()]), people[rows])
        mated, non_mated = chosen & same, chosen & ~same
        return Split(
            by,
            part,
            len(rows),
            round(float(right[rows].mean()), 4),
            (round(float(low[0]), 4), round(float(high[0]), 4)),
            round(float((~called_same[mated]).mean()), 4) if mated.sum() >= fewest else None,
            round(float(called_same[non_mated].mean()), 4) if non_mated.sum() >= fewest else None,
        )

    found = []
    for name, value, worse in QUALITIES:
        of_pair = np.array(
            [
                worse(value(quality_of[a]), value(quality_of[b])) if a in quality_of and b in quality_of else np.nan
                for a, b in zip(first, second, strict=True)
            ]
        )
        found += [split(name, part, chosen) for part, chosen in _thirds(of_pair) if chosen.any()]
    counts = np.array(
        [min(photos_of[a.split("/")[0]], photos_of[b.split("/")[0]]) for a, b in zip(first, second, strict=True)]
    )
    for part, chosen in (("1", counts == 1), ("2 to 5", (counts > 1) & (counts < 6)), ("6 or more", counts > 5)):
        if chosen.any():
            found.append(split("photos of the person", part, chosen))
    return found


def _thirds(values: Floats) -> list[tuple[str, Bools]]:
    if np.isnan(values).all():
        return []
    low, high = np.nanquantile(values, [1 / PARTS, 1 - 1 / PARTS])
    digits = 0 if high >= 30 else 1 if high >= 3 else 2
    return [
        (f"to {low:.{digits}f}", values <= low),
        (f"{low:.{digits}f} to {high:.{digits}f}", (values > low) & (values <= high)),
        (f"over {high:.{digits}f}", values > high),
    ]


def worst_pairs(
    similarities: Floats, same: Bools, first: Sequence[str], second: Sequence[str], seen: Bools
) -> WorstPairs:
    """Of the (P,) pairs both of whose faces were ``seen``: a face that was not found is the detector's failure."""
    order = np.argsort(similarities, kind="stable")

    def named(rows: Sequence[int]) -> tuple[tuple[str, str, float], ...]:
        return tuple((first[row], second[row], round(float(similarities[row]), 4)) for row in rows)

    mated, non_mated = order[(same & seen)[order]], order[(~same & seen)[order]][::-1]
    return WorstPairs(named(mated[:WORST].tolist()), named(non_mated[:WORST].tolist()))

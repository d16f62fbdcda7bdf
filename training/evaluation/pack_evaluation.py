"""Every figure of a model card: a pack measured on LFW and WIDER FACE, and where it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.pack.manifest import ModelPack
from models.vision.quality import Quality
from training.evaluation.detection import evaluate_detection
from training.evaluation.embedding import Embedder
from training.evaluation.lfw import PARTS, Part, files_of, identify, people_of, read_open_set, read_pairs, verify
from training.evaluation.metrics import Bools, Floats, bootstrap, fold_decisions

WORST_PAIR_COUNT: Final = 5
MIN_PAIRS: Final = 50
"""Minimum number of mated or non-mated pairs for a rate."""
Interval = tuple[float, float]
# Name of each split, its value, and the function that selects the worse of two values.
QUALITIES: Final[tuple[tuple[str, Callable[[Quality], float], Callable[[float, float], float]], ...]] = (
    ("distance of the eyes, px", lambda q: q.eye_distance_px, min),
    ("sharpness", lambda q: q.sharpness, min),
    ("brightness", lambda q: q.brightness, min),
    ("contrast", lambda q: q.contrast, min),
    ("yaw, absolute", lambda q: abs(q.yaw), max),
    ("quality score", lambda q: q.score, min),
)


@dataclass(frozen=True)
class Split:
    """Group of pairs, decided at the thresholds of their folds.

    ``fnmr`` covers mated and ``fmr`` non-mated pairs; None if there are too few. ``interval`` is the 95 % interval of
    the accuracy over people.
    """

    by: str
    part: str
    pairs: int
    accuracy: float
    interval: Interval
    fnmr: float | None
    fmr: float | None


@dataclass(frozen=True)
class WorstPairs:
    """Least similar mated pairs and most similar non-mated pairs: two files and their similarity, worst first."""

    mated: tuple[tuple[str, str, float], ...]
    non_mated: tuple[tuple[str, str, float], ...]


def evaluate_pack(pack: ModelPack, data: Path, view1_only: bool = False) -> dict[str, Any]:
    """Compute all figures of the model card, through the pack's own detector.

    Args:
        data: folder with lfw/ and wider/ (see docs/training.md).
        view1_only: only LFW View 1.
    """
    embedder = Embedder(pack)
    lfw = data / "lfw"
    parts: tuple[Part, ...] = ("view1",) if view1_only else PARTS
    embeddings = embedder.embeddings(sorted(set().union(*(files_of(lfw, part) for part in parts))), lfw / "images")
    report: dict[str, Any] = {"lfw_view1": asdict(verify(embeddings, read_pairs(lfw / "pairsDevTest.txt")))}
    if not view1_only:
        pairs = read_pairs(lfw / "pairs.txt")
        report["lfw_view2"] = asdict(verify(embeddings, pairs))
        similarities = embeddings.similarities(pairs)
        called_same = fold_decisions(similarities, pairs.same, pairs.folds)
        qualities = embedder.qualities(sorted({*pairs.first, *pairs.second}), lfw / "images")
        counts = Counter(people_of(embeddings.files).tolist())
        report["lfw_splits"] = [
            asdict(split)
            for split in split_pairs(called_same, pairs.same, pairs.first, pairs.second, qualities, counts)
        ]
        seen = embeddings.found[embeddings.rows(pairs.first)] & embeddings.found[embeddings.rows(pairs.second)]
        report["lfw_worst_pairs"] = asdict(worst_pairs(similarities, pairs.same, pairs.first, pairs.second, seen))
        protocol = read_open_set(lfw / "openset_protocol.json")
        report["lfw_open_set"] = asdict(identify(embeddings, protocol))
        report |= evaluate_detection(embedder.detector, data)
        report["counts"] |= {
            "gallery": len(protocol.gallery),
            "mated": len(protocol.mated),
            "strangers": len(protocol.strangers),
        }
    return report


def split_pairs(
    called_same: Bools,
    same: Bools,
    first: Sequence[str],
    second: Sequence[str],
    quality_of: Mapping[str, Quality],
    photos_of: Counter[str],
    min_pairs: int = MIN_PAIRS,
) -> list[Split]:
    """Group pairs into terciles of each quality, by the worse photo, and by the person's number of photos in LFW.

    Args:
        called_same: (P,) decisions.
        same: (P,) truth.
        first, second: (P,) files, ``Person/photo``.
        quality_of: quality by file; pairs of photos without a face are in no tercile.
        photos_of: number of photos by person; the smaller of a pair counts.
        min_pairs: minimum number of mated or non-mated pairs for a rate.
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
            round(float((~called_same[mated]).mean()), 4) if mated.sum() >= min_pairs else None,
            round(float(called_same[non_mated].mean()), 4) if non_mated.sum() >= min_pairs else None,
        )

    found = []
    for name, value, worse in QUALITIES:
        of_pair = np.array(
            [
                worse(value(quality_of[a]), value(quality_of[b])) if a in quality_of and b in quality_of else np.nan
                for a, b in zip(first, second, strict=True)
            ]
        )
        found += [split(name, part, chosen) for part, chosen in _terciles(of_pair) if chosen.any()]
    counts = np.array(
        [min(photos_of[a.split("/")[0]], photos_of[b.split("/")[0]]) for a, b in zip(first, second, strict=True)]
    )
    for part, chosen in (("1", counts == 1), ("2 to 5", (counts > 1) & (counts < 6)), ("6 or more", counts > 5)):
        if chosen.any():
            found.append(split("photos of the person", part, chosen))
    return found


def _terciles(values: Floats) -> list[tuple[str, Bools]]:
    if np.isnan(values).all():
        return []
    low, high = np.nanquantile(values, [1 / 3, 2 / 3])
    digits = 0 if high >= 30 else 1 if high >= 3 else 2
    return [
        (f"to {low:.{digits}f}", values <= low),
        (f"{low:.{digits}f} to {high:.{digits}f}", (values > low) & (values <= high)),
        (f"over {high:.{digits}f}", values > high),
    ]


def worst_pairs(
    similarities: Floats, same: Bools, first: Sequence[str], second: Sequence[str], seen: Bools
) -> WorstPairs:
    """Return the worst of (P,) pairs. Only ``seen`` pairs count: a missed face is an error of the detector."""
    order = np.argsort(similarities, kind="stable")

    def named(rows: Sequence[int]) -> tuple[tuple[str, str, float], ...]:
        return tuple((first[row], second[row], round(float(similarities[row]), 4)) for row in rows)

    mated, non_mated = order[(same & seen)[order]], order[(~same & seen)[order]][::-1]
    return WorstPairs(named(mated[:WORST_PAIR_COUNT].tolist()), named(non_mated[:WORST_PAIR_COUNT].tolist()))

"""Verification and identification metrics. Pure numpy; similarities, larger is more alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FoldAccuracy:
    """LFW's protocol: mean and standard deviation over folds, each judged by the threshold of the other nine."""

    mean: float
    std: float
    folds: tuple[float, ...]


def best_threshold(similarities: Floats, same: NDArray[np.bool_]) -> float:
    """The threshold of highest accuracy (similarity >= t means same); the middle of its gap, the lowest of equals."""
    order = np.argsort(similarities, kind="stable")
    ordered, labels = similarities[order], same[order]
    # Cutting before row i: rows below are called different.
    correct = np.concatenate([[0], np.cumsum(~labels)]) + labels.sum() - np.concatenate([[0], np.cumsum(labels)])
    edges = np.concatenate([[ordered[0] - 1e-6], (ordered[1:] + ordered[:-1]) / 2, [ordered[-1] + 1e-6]])
    # No threshold can cut between equal similarities.
    correct[1:-1][ordered[1:] == ordered[:-1]] = -1
    return float(edges[int(correct.argmax())])


def fold_accuracy(similarities: Floats, same: NDArray[np.bool_], folds: NDArray[np.int64]) -> FoldAccuracy:
    scores = []
    for fold in np.unique(folds):
        held_out = folds == fold
        threshold = best_threshold(similarities[~held_out], same[~held_out])
        scores.append(float(((similarities[held_out] >= threshold) == same[held_out]).mean()))
    return FoldAccuracy(float(np.mean(scores)), float(np.std(scores)), tuple(scores))


def tar_at_far(similarities: Floats, same: NDArray[np.bool_], far: float) -> float:
    """Share of same pairs accepted at the lowest threshold that accepts at most ``far`` of the different pairs."""
    different = np.sort(similarities[~same])[::-1]
    allowed = int(far * len(different))
    # Strictly above the first impostor that must be refused.
    return float((similarities[same] > different[allowed]).mean()) if allowed < len(different) else 1.0


def equal_error_rate(similarities: Floats, same: NDArray[np.bool_]) -> float:
    """Where FMR and FNMR cross, linearly between thresholds."""
    thresholds = np.unique(similarities)
    impostors, mates = np.sort(similarities[~same]), np.sort(similarities[same])
    fmr = 1 - np.searchsorted(impostors, thresholds, "left") / len(impostors)
    fnmr = np.searchsorted(mates, thresholds, "left") / len(mates)
    crossing = int(np.argmax(fnmr >= fmr))
    if crossing == 0:
        return float((fmr[0] + fnmr[0]) / 2)
    before, after = fmr[crossing - 1] - fnmr[crossing - 1], fnmr[crossing] - fmr[crossing]
    share = before / max(before + after, 1e-12)
    return float(fmr[crossing - 1] + share * (fmr[crossing] - fmr[crossing - 1]))


@dataclass(frozen=True)
class OpenSet:
    """``fnir`` at each requested ``fpir``, the thresholds that hindsight chooses for them, and closed-set rank-1."""

    rank1: float
    fnir: dict[float, float]
    thresholds: dict[float, float]


def open_set(
    gallery: Floats,
    mated: Floats,
    mates: NDArray[np.int64],
    strangers: Floats,
    rates: tuple[float, ...] = (0.1, 0.01, 0.001),
) -> OpenSet:
    """(G, d), (m, d) and (s, d) unit vectors; ``mates`` (m,): each mated probe's row in the gallery."""
    scores = mated @ gallery.T
    best = scores.argmax(1)
    correct = best == mates
    highest = scores.max(1)
    alarms = np.sort((strangers @ gallery.T).max(1))[::-1]
    fnir, thresholds = {}, {}
    for rate in rates:
        threshold = float(np.nextafter(alarms[int(rate * len(alarms))], 2.0))
        thresholds[rate] = threshold
        fnir[rate] = float(1 - (correct & (highest >= threshold)).mean())
    return OpenSet(float(correct.mean()), fnir, thresholds)

"""Metrics agree with plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from training.metrics import best_threshold, equal_error_rate, fold_accuracy, open_set, tar_at_far


@pytest.fixture
def pairs(rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
    same = rng.random(2000) < 0.5
    similarities = np.round(rng.normal(np.where(same, 0.4, 0.0), 0.2), 2)  # rounded: ties
    return similarities, same, np.arange(2000) % 10


def test_best_threshold(pairs: tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]) -> None:
    similarities, same, _ = pairs
    ours = ((similarities >= best_threshold(similarities, same)) == same).mean()
    loop = max(((similarities >= t) == same).mean() for t in [*np.unique(similarities), 9.0])
    assert ours == loop


def test_each_fold_is_judged_by_the_others(
    pairs: tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]],
) -> None:
    similarities, same, folds = pairs
    result = fold_accuracy(similarities, same, folds)
    for fold in range(10):
        threshold = best_threshold(similarities[folds != fold], same[folds != fold])
        right = [(s >= threshold) == k for s, k, f in zip(similarities, same, folds, strict=True) if f == fold]
        assert result.folds[fold] == pytest.approx(np.mean(right))
    assert result.mean == pytest.approx(np.mean(result.folds))
    assert result.std == pytest.approx(np.std(result.folds))


@pytest.mark.parametrize("far", [0.001, 0.01, 0.1, 1.0])
def test_tar_at_far(pairs: tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]], far: float) -> None:
    similarities, same, _ = pairs
    best = 0.0
    for t in [*np.unique(similarities), 9.0]:
        if (similarities[~same] >= t).mean() <= far:
            best = max(best, float((similarities[same] >= t).mean()))
    assert tar_at_far(similarities, same, far) == pytest.approx(best)


def test_equal_error_rate(pairs: tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]) -> None:
    similarities, same, _ = pairs
    rates = [((similarities[~same] >= t).mean(), (similarities[same] < t).mean()) for t in np.unique(similarities)]
    nearest = min(rates, key=lambda r: abs(r[0] - r[1]))
    assert min(nearest) - 0.02 <= equal_error_rate(similarities, same) <= max(nearest) + 0.02
    assert equal_error_rate(np.array([0.0, 0.1, 0.8, 0.9]), np.array([False, False, True, True])) == pytest.approx(
        0, abs=1e-9
    )


def test_open_set(rng: np.random.Generator) -> None:
    def units(n: int) -> NDArray[np.float64]:
        v = rng.normal(size=(n, 16))
        return np.asarray(v / np.linalg.norm(v, axis=1, keepdims=True))

    gallery, strangers = units(20), units(500)
    mates = rng.integers(20, size=300)
    mated = gallery[mates] + 0.25 * rng.normal(size=(300, 16))
    mated /= np.linalg.norm(mated, axis=1, keepdims=True)
    result = open_set(gallery, mated, mates, strangers)
    for rate, threshold in result.thresholds.items():
        alarms = sum(max(float(s @ g) for g in gallery) >= threshold for s in strangers)
        assert alarms == int(rate * 500)
        missed = 0
        for probe, mate in zip(mated, mates, strict=True):
            scores = [float(probe @ g) for g in gallery]
            missed += int(np.argmax(scores)) != mate or max(scores) < threshold
        assert result.fnir[rate] == pytest.approx(missed / 300)
    assert result.rank1 == pytest.approx(
        np.mean([np.argmax(gallery @ p) == m for p, m in zip(mated, mates, strict=True)])
    )

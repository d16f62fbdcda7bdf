"""Figures of labeled people: equal to those of lists of pairs, with intervals, and never an error for few photos."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from models.runtime.network import Float
from training.evaluation.metrics import bootstrap, resampled_tar, tar_at_far
from training.evaluation.people import evaluate_people


def draw(people: int, photos: int, noise: float = 1.0, seed: int = 3) -> tuple[Float, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(people), photos)
    vectors = rng.normal(size=(people, 16))[labels] + noise * rng.normal(size=(people * photos, 16))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels


def test_rates_are_those_of_all_pairs_and_of_a_gallery_of_half_of_the_people() -> None:
    vectors, labels = draw(30, 4)
    found = evaluate_people(vectors, labels)
    pairs = [(i, j) for i in range(120) for j in range(i)]
    similarities = np.array([float(vectors[i] @ vectors[j]) for i, j in pairs])
    same = np.array([labels[i] == labels[j] for i, j in pairs])
    assert (found.people, found.photos) == (30, 120)
    for far in (1e-2, 1e-3):
        assert found.rates[f"TAR at FAR {far:g}"] == pytest.approx(tar_at_far(similarities, same, far))
    gallery = vectors[labels % 2 == 0][::4]
    probes = np.flatnonzero((labels % 2 == 0) & (np.arange(120) % 4 > 0))
    scores, alarms = vectors[probes] @ gallery.T, (vectors[labels % 2 == 1] @ gallery.T).max(1)
    first = scores.argmax(1) == labels[probes] // 2
    assert found.rates["rank-1"] == pytest.approx(first.mean())
    sixth = np.sort(alarms)[::-1][6]  # of 60: a threshold above it lets six strangers pass
    assert found.rates["FNIR at FPIR 0.1"] == pytest.approx(1 - (first & (scores.max(1) > sixth)).mean())
    assert found.too_small == (
        "TAR at FAR 0.0001 needs 10,000 pairs of different people, not 6,960",
        "FNIR at FPIR 0.01 needs 100 photos of strangers, not 60",
    )


def test_intervals_hold_the_rates_and_narrow_with_more_people() -> None:
    widths = []
    for people in (12, 80):
        found = evaluate_people(*draw(people, 4, 1.5), intervals=True)
        for name, rate in found.rates.items():
            assert isinstance(rate, tuple), name
            value, low, high = rate
            assert 0 <= low <= value <= high <= 1, name
        rate = found.rates["rank-1"]
        assert isinstance(rate, tuple)
        widths.append(rate[2] - rate[1])
    assert widths[1] < widths[0]


def test_resampled_rates_equal_those_of_the_bootstrap() -> None:
    rng = np.random.default_rng(5)
    people = rng.integers(9, size=(400, 2))
    same = people[:, 0] == people[:, 1]
    similarities = np.round(rng.normal(np.where(same, 0.5, 0.2), 0.2), 2)  # with ties
    fars = (0.1, 0.01)

    def figures(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.array([tar_at_far(similarities[rows], same[rows], far) for far in fars])

    for one, other in zip(
        resampled_tar(similarities, same, people, fars, 200), bootstrap(figures, people, 200), strict=True
    ):
        assert one.tolist() == pytest.approx(other.tolist())


def test_the_worst_pairs_come_first() -> None:
    vectors, labels = draw(10, 3)
    found = evaluate_people(vectors, labels)
    similarity = vectors @ vectors.T
    other = np.where(labels[:, None] != labels, similarity, -2)
    mates = np.where((labels[:, None] == labels) & ~np.eye(30, dtype=bool), similarity, 2)
    assert found.lookalikes[0].similarity == pytest.approx(other.max())
    assert found.mates[0].similarity == pytest.approx(mates.min())
    for pairs, sign in ((found.lookalikes, -1), (found.mates, 1)):
        scores = [sign * pair.similarity for pair in pairs]
        assert scores == sorted(scores)
        assert len(pairs) == 6
    assert all(labels[pair.first] != labels[pair.second] for pair in found.lookalikes)
    assert all(labels[pair.first] == labels[pair.second] for pair in found.mates)


@pytest.mark.parametrize(("people", "photos"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 2), (4, 5)])
@pytest.mark.parametrize("intervals", [False, True])
def test_few_photos_are_no_error(people: int, photos: int, intervals: bool) -> None:
    found = evaluate_people(*draw(people, photos), intervals)
    assert (found.people, found.photos) == (people, people * photos)
    assert all(isinstance(rate, float) for rate in found.rates.values())
    assert len(found.rates) + len(found.too_small) >= 2
    if (people, photos) == (1, 4):
        assert found.too_small[0] == "TAR needs two photos of one person, and photos of two people: 6 and 0 such pairs"

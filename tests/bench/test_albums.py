"""Figures of the albums benchmark, computed by hand, and its choice of people."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bench.albums import judge, reported_half, with_lookalikes
from service.index.neighbors import nearest


def test_figures_are_those_of_their_definitions() -> None:
    """Groups {a, a, b} and {b}, {b}: of three grouped pairs one is right, of four pairs of one person one is found."""
    figures = judge(np.array([0, 0, 0, 1, 2]), np.array(["a", "a", "b", "b", "b"]))
    assert figures["precision"] == pytest.approx(1 / 3)
    assert figures["wrong"] == pytest.approx(2 / 3)
    assert figures["recall"] == pytest.approx(1 / 4)
    assert figures["false_match_rate"] == pytest.approx(2 / 6)
    assert figures["bcubed_precision"] == pytest.approx((2 / 3 + 2 / 3 + 1 / 3 + 1 + 1) / 5)
    assert figures["bcubed_recall"] == pytest.approx((1 + 1 + 1 / 3 + 1 / 3 + 1 / 3) / 5)
    assert judge(np.arange(3), np.array(["a", "b", "c"]))["wrong"] == 0


def test_no_person_is_in_both_halves() -> None:
    people = np.array([f"person {n // 3}" for n in range(300)])
    reported = reported_half(people)
    assert reported.sum() == 150
    assert not set(people[~reported]) & set(people[reported])


def test_lookalikes_in_one_photo_are_strangers() -> None:
    rng = np.random.default_rng(0)
    people = np.array([f"person {n % 100}" for n in range(300)])
    vectors = rng.standard_normal((300, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    photos = with_lookalikes(people, nearest(vectors))
    shared = [photo for photo, count in Counter(photos.tolist()).items() if count > 1]
    assert 10 <= len(shared) <= 15
    for photo in shared:
        (a, b) = np.flatnonzero(photos == photo)
        assert people[a] != people[b]

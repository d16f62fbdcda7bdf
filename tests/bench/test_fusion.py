"""The fusion benchmark draws the documented samples and normalizes by the formula."""

from __future__ import annotations

import numpy as np
import pytest

from bench.fusion import cohort_of_subjects, draw, normalized
from training.evaluation.lfw import DOUBTFUL_STRANGERS

SIZE = 4


@pytest.mark.parametrize("count", [1, 3])
def test_templates_probes_and_strangers_are_different_photos(count: int) -> None:
    names = [f"many{i}" for i in range(12)] + [f"few{i}" for i in range(9)]
    people = np.array([*np.repeat(names, [5] * 12 + [2] * 9), *(f"one{i}" for i in range(7)), *DOUBTFUL_STRANGERS])
    drawn = draw(people, count, np.random.default_rng(0), subjects=10)
    assert len(drawn.templates) == 10 * count
    assert not set(drawn.templates) & set(drawn.probes)
    enrolled = people[drawn.templates].reshape(10, count)
    assert (enrolled == enrolled[:, :1]).all()
    assert (people[drawn.probes] == enrolled[drawn.mates, 0]).all()
    assert all(name.startswith("one") for name in people[drawn.strangers])


def test_s_norm_is_its_formula(rng: np.random.Generator) -> None:
    similarities, enrolled = rng.normal(size=(5, 9)), rng.normal(size=(14, 9))
    owners = np.array([0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 6, 7, 8, 8])
    found = normalized(similarities, *cohort_of_subjects(enrolled, owners, SIZE), SIZE)
    for p in range(5):
        for s in range(9):
            score = similarities[p, s]
            probe_cohort = np.sort(np.delete(similarities[p], s))[-SIZE:]
            own = [np.sort(np.delete(row, s))[-SIZE:] for row in enrolled[owners == s]]
            mean, deviation = np.mean([c.mean() for c in own]), np.mean([c.std() for c in own])
            expected = (score - probe_cohort.mean()) / probe_cohort.std() + (score - mean) / deviation
            assert found[p, s] == pytest.approx(expected / 2, rel=1e-6)

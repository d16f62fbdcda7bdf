"""Batches cover every image, balance people, and are reproducible."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config import ConfigError
from training.data.sampling import BatchSampler, schedule_people
from training.data.subsampling import evenly_spaced_rows, limit_per_label

COUNTS = np.array([2, 3, 4, 5, 9, 17, 4, 6, 1, 4, 8])
LABELS = np.random.default_rng(2).permutation(np.repeat(np.arange(len(COUNTS)), COUNTS))


def test_every_row_is_seen_once_an_epoch() -> None:
    sampler = BatchSampler(LABELS, 5, seed=1)
    assert sampler.steps_per_epoch == 12
    epochs = [np.stack([sampler.rows(epoch, position) for position in range(12)]) for epoch in range(2)]
    for rows in epochs:
        assert len(np.unique(rows)) == 60
        assert (np.diff(rows) > 0).all()
    assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.parametrize("images_per_person", [0, 3])
def test_rows_depend_only_on_seed_epoch_and_position(images_per_person: int) -> None:
    sampler = BatchSampler(LABELS, 12, seed=1, images_per_person=images_per_person)
    forward = {(epoch, position): sampler.rows(epoch, position) for epoch in range(3) for position in range(5)}
    for (epoch, position), rows in reversed(forward.items()):
        assert np.array_equal(sampler.rows(epoch, position), rows)
        assert np.array_equal(BatchSampler(LABELS, 12, 1, images_per_person).rows(epoch, position), rows)
    assert not np.array_equal(BatchSampler(LABELS, 12, 2, images_per_person).rows(0, 0), forward[0, 0])


@pytest.mark.parametrize(("k", "batch_size"), [(1, 7), (2, 8), (4, 12), (4, 44), (5, 55)])
def test_balanced_batches(k: int, batch_size: int) -> None:
    sampler = BatchSampler(LABELS, batch_size, seed=3, images_per_person=k)
    assert sampler.steps_per_epoch == len(LABELS) // batch_size
    for epoch in range(20):
        batches = [sampler.rows(epoch, position) for position in range(sampler.steps_per_epoch)]
        for rows in batches:
            people, images = np.unique(LABELS[rows], return_counts=True)
            assert len(people) == batch_size // k
            assert (images == k).all()
            for person in people:
                own = rows[LABELS[rows] == person]
                assert len(np.unique(own)) == min(k, COUNTS[person])
        seen = np.bincount(np.concatenate(batches), minlength=len(LABELS))
        of_people = np.bincount(LABELS, seen)
        assert np.ptp(of_people) <= k  # one turn
        for person in range(len(COUNTS)):
            assert np.ptp(seen[person == LABELS]) <= 1


def test_a_class_without_images_is_never_drawn() -> None:
    sampler, gapless = BatchSampler(LABELS * 2 + 1, 12, 5, 3), BatchSampler(LABELS, 12, 5, 3)
    assert all(np.array_equal(sampler.rows(0, i), gapless.rows(0, i)) for i in range(sampler.steps_per_epoch))


@given(st.integers(1, 30), st.data())
def test_no_person_repeats_within_a_group(people: int, data: st.DataObject) -> None:
    group, groups = data.draw(st.integers(1, people)), data.draw(st.integers(1, 20))
    turns = schedule_people(people, group, group * groups, np.random.default_rng(0))
    assert all(len(set(row)) == group for row in turns.reshape(groups, group).tolist())
    assert np.ptp(np.bincount(turns, minlength=people)) <= 1


def test_a_set_smaller_than_a_batch_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"63 images are fewer than one batch of 64\. Lower loop\.batch_size"):
        BatchSampler(LABELS, 64, seed=1)
    with pytest.raises(ConfigError, match=r"needs 24 people, but there are 11.*data\.images_per_person"):
        BatchSampler(LABELS, 48, seed=1, images_per_person=2)


def test_rows_are_evenly_spaced_as_those_of_shipped_packs() -> None:
    """The formula that selected the crops of the shipped packs."""
    for count, wanted in product((1, 2, 5, 31, 32, 33, 42_427), (1, 2, 32, 2000)):
        expected = np.unique(np.linspace(0, count - 1, wanted).astype(int))
        assert np.array_equal(evenly_spaced_rows(count, wanted), expected)
    labels = np.array([0, 0, 0, 0, 0, 1, 1, 2])
    for limit, rows in ((None, list(range(8))), (3, [0, 2, 4, 5, 6, 7]), (2, [0, 4, 5, 6, 7])):
        assert limit_per_label(limit, labels).tolist() == rows

"""Batch sampling as a function of seed, epoch and position, so that any step can be replayed."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from training.config import ConfigError


class BatchSampler:
    """Batches of an epoch, shuffled or identity-balanced.

    With ``images_per_person`` = 0, every image comes once per epoch, shuffled; the last partial batch is dropped. With
    k > 0, a batch holds k images of each of ``batch_size / k`` people. Within an epoch, the number of turns of two
    people differs by at most one. An image repeats within a batch only if its person has fewer than k. An epoch has as
    many images as the set. Raises ConfigError: the set is too small for one batch.

    Args:
        labels: (n,) class of each row.
        batch_size: size of the global batch; a multiple of ``images_per_person``.
    """

    def __init__(self, labels: NDArray[np.int64], batch_size: int, seed: int, images_per_person: int = 0) -> None:
        self._batch_size, self._seed, self._k = batch_size, seed, images_per_person
        # Renumber: a class is empty if no face was found in its photos.
        _, self._labels, self._counts = np.unique(labels, return_inverse=True, return_counts=True)
        self._order = lru_cache(2)(self._shuffle)  # threads prepare the batches before and after the end of an epoch
        if len(labels) < batch_size:
            raise ConfigError(f"{len(labels)} images are fewer than one batch of {batch_size}. Lower loop.batch_size")
        if images_per_person and len(self._counts) * images_per_person < batch_size:
            raise ConfigError(
                f"a batch of {batch_size} with {images_per_person} images a person needs "
                f"{batch_size // images_per_person} people, but there are {len(self._counts)}. Lower loop.batch_size "
                "or raise data.images_per_person"
            )

    @property
    def steps_per_epoch(self) -> int:
        return len(self._labels) // self._batch_size

    def rows(self, epoch: int, position: int) -> NDArray[np.int64]:
        """Return (batch_size,) rows of batch ``position`` of an epoch, ascending for sequential memory-map reads."""
        start = position * self._batch_size
        return np.sort(self._order(epoch)[start : start + self._batch_size])

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        rng = np.random.default_rng((self._seed, epoch))
        return self._balanced(rng) if self._k else rng.permutation(len(self._labels))

    def _balanced(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the rows of all batches of an epoch, k of a person side by side."""
        turns = self.steps_per_epoch * self._batch_size // self._k
        people = schedule_people(len(self._counts), self._batch_size // self._k, turns, rng)
        shuffled = np.lexsort((rng.random(len(self._labels)), self._labels))  # by person, shuffled within each person
        starts = np.cumsum(self._counts) - self._counts
        # Each person has one turn per pass, so the pass number selects the next images of that person.
        taken = np.arange(turns)[:, None] // len(self._counts) * self._k + np.arange(self._k)
        return np.asarray(shuffled[starts[people, None] + taken % self._counts[people, None]].ravel(), np.int64)


def schedule_people(people: int, group: int, turns: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return (turns,) people: shuffled passes over all of them, in groups without repetition. A group may span two
    passes. People at the end of the old pass then come after that group in the new pass."""
    passes = [rng.permutation(people)]
    for number in range(1, -(-turns // people)):
        started = number * people % group
        following = rng.permutation(people)
        if started:
            waiting = np.isin(following, passes[-1][people - started :])
            first = following[~waiting][: group - started]
            following = np.concatenate([first, following[~np.isin(following, first)]])
        passes.append(following)
    return np.concatenate(passes)[:turns]

"""Which rows make up a batch: a function of (seed, epoch, position), so that any step can be returned to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from training.config import ConfigError


class BatchSampler:
    """The order in which a set is shown.

    With ``images_per_person`` = 0 every image comes once an epoch (or ``repeats`` times), in a shuffled order; the
    last, partial batch is left out. With k > 0 a batch holds k images of each of ``batch_size / k`` different people:
    people come by turns, so that within an epoch nobody has more than one turn more than another, and a person's
    images come by turns too; an image is repeated within a batch only where its person has fewer than k. An epoch is
    as many images as the set holds, repeats counted.

    Args:
        labels: (n,) class of each row.
        batch_size: of all ranks together; a multiple of ``images_per_person``.
        repeats: (n,) times that each row comes in an epoch of unbalanced batches; None: once.

    Raises:
        ConfigError: the set is too small for one batch.
    """

    def __init__(
        self,
        labels: NDArray[np.int64],
        batch_size: int,
        seed: int,
        images_per_person: int = 0,
        repeats: NDArray[np.int64] | None = None,
    ) -> None:
        self._batch_size, self._seed, self._k = batch_size, seed, images_per_person
        # Renumbered: a class is empty where no face was found in any of its photos.
        _, self._labels, self._counts = np.unique(labels, return_inverse=True, return_counts=True)
        self._shown = np.arange(len(labels)) if repeats is None else np.repeat(np.arange(len(labels)), repeats)
        self._remembered: tuple[int, NDArray[np.int64]] | None = None
        if len(labels) < batch_size:
            raise ConfigError(f"{len(labels)} images are fewer than one batch of {batch_size}; lower loop.batch_size")
        if images_per_person and len(self._counts) * images_per_person < batch_size:
            raise ConfigError(
                f"a batch of {batch_size} with {images_per_person} images a person needs "
                f"{batch_size // images_per_person} people and there are {len(self._counts)}; lower loop.batch_size or "
                "raise data.images_per_person"
            )

    @property
    def steps_per_epoch(self) -> int:
        return len(self._shown) // self._batch_size

    def rows(self, epoch: int, position: int) -> NDArray[np.int64]:
        """(batch_size,) rows of batch ``position`` of an epoch, ascending: a memory map is read in its order."""
        if self._remembered is None or self._remembered[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            order = self._balanced(rng) if self._k else rng.permutation(self._shown)
            self._remembered = epoch, order
        start = position * self._batch_size
        return np.sort(self._remembered[1][start : start + self._batch_size])

    def _balanced(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Rows of all batches of an epoch, k of a person side by side."""
        turns = self.steps_per_epoch * self._batch_size // self._k
        people = turns_of_people(len(self._counts), self._batch_size // self._k, turns, rng)
        shuffled = np.lexsort((rng.random(len(self._labels)), self._labels))  # by person, in random order within
        starts = np.cumsum(self._counts) - self._counts
        # Everybody has one turn a pass: the pass is how many turns a person has had, and its images go round.
        taken = np.arange(turns)[:, None] // len(self._counts) * self._k + np.arange(self._k)
        return np.asarray(shuffled[starts[people, None] + taken % self._counts[people, None]].ravel(), np.int64)


def turns_of_people(people: int, group: int, turns: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """(turns,) people: shuffled passes over all of them, cut into groups in which nobody comes twice.

    A group may begin in one pass and end in the next; whoever closed the old pass then waits in the new one until that
    group is full.
    """
    passes = [rng.permutation(people)]
    for number in range(1, -(-turns // people)):
        begun = number * people % group
        following = rng.permutation(people)
        if begun:
            waiting = np.isin(following, passes[-1][people - begun :])
            first = following[~waiting][: group - begun]
            following = np.concatenate([first, following[~np.isin(following, first)]])
        passes.append(following)
    return np.concatenate(passes)[:turns]

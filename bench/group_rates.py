"""Error rates of groups of people at one threshold, with 95 % intervals over people. Pure functions.

People are resampled with all their photos. A comparison of two people counts the product of their draws (A. Owen and
D. Eckles, "Bootstrapping data arrays of arbitrary order", Annals of Applied Statistics 6(3), 2012).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from models.runtime.network import Float
from training.evaluation.metrics import Bools, Floats

ROUNDS: Final = 500
BLOCK_ROWS: Final = 512


@dataclass(frozen=True, eq=False)
class Estimate:
    """A rate in [0, 1], or a ratio of rates, and its (rounds,) values for resampled people."""

    value: float
    resampled: Floats

    def over(self, other: Estimate) -> Estimate:
        """Return the ratio to an estimate on the same resampled people."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return Estimate(float(np.divide(self.value, other.value)), self.resampled / other.resampled)

    def interval(self) -> tuple[float, float]:
        """Return the 95 % percentile interval."""
        low, high = np.nanquantile(self.resampled, [0.025, 0.975])
        return float(low), float(high)


def draw_weights(people: int, rounds: int = ROUNDS, seed: int = 0) -> Floats:
    """Return the (people, 1 + rounds) number of draws of each person: 1 in the first column, then resampled."""
    drawn = np.random.default_rng(seed).multinomial(people, np.full(people, 1 / people), rounds).T
    return np.concatenate([np.ones((people, 1)), drawn], 1)


class FalseMatches:
    """Comparisons of different people that reach a threshold, among all comparisons of a set of photos: (n, d)
    ``vectors`` of unit length, (n,) ``people`` in them."""

    def __init__(self, vectors: Float, people: NDArray[np.str_], threshold: float, rounds: int = ROUNDS) -> None:
        self.threshold, self.rounds = threshold, rounds
        self._person = np.unique(people, return_inverse=True)[1]
        self._weights = draw_weights(int(self._person.max()) + 1, rounds)
        blocks = []
        for start in range(0, len(vectors), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            matched = vectors[block] @ vectors.T >= threshold
            blocks.append(csr_array(matched & (self._person[block, None] != self._person), dtype=np.float64))
        self._matches = csr_array(vstack(blocks))

    def rate(self, first: Bools, second: Bools | None = None) -> Estimate:
        """Return the FMR of comparisons between two groups of (n,) photos, by default within the first. Photos in both
        groups are compared within them too. Raises ValueError if there are no two people to compare."""
        second = first if second is None else second
        reached = self._matches[np.flatnonzero(first)][:, np.flatnonzero(second)]
        left, right = (self._weights[self._person[chosen]] for chosen in (first, second))
        matches = (left * (reached @ right)).sum(0)
        photos = [np.bincount(self._person[chosen], minlength=len(self._weights)) for chosen in (first, second)]
        own = (photos[0] * photos[1]) @ self._weights**2
        comparisons = (photos[0] @ self._weights) * (photos[1] @ self._weights) - own
        if comparisons[0] <= 0:
            raise ValueError("two groups need two people to compare")
        return _estimate(matches, comparisons)


def share(chosen: Bools, people: NDArray[np.str_], rounds: int = ROUNDS) -> Estimate:
    """Return the share of (n,) comparisons of single ``people`` (n,) that are chosen, such as those that miss."""
    person = np.unique(people, return_inverse=True)[1]
    weights = draw_weights(int(person.max()) + 1, rounds)
    return _estimate(np.bincount(person, chosen) @ weights, np.bincount(person) @ weights)


def _estimate(parts: Floats, wholes: Floats) -> Estimate:
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = parts / wholes
    return Estimate(float(rates[0]), rates[1:])

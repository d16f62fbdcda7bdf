"""What an index of a gallery's vectors is made of, and what it says of itself. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from models.network import Float
from service.gallery.subjects import Gallery

Keys = NDArray[np.int64]
Kind = Literal["exact", "compact", "graph"]


class Structure(Protocol):
    """Finds those of a segment's vectors that are probably most similar, without comparing every one."""

    vectors: Float
    """(n, d), as they were given: a structure that must own its vectors lends them out, so that there is one copy."""
    memory_bytes: int
    """Beside the vectors."""

    def candidates(self, probes: Float, depth: int) -> tuple[Float, Keys]:
        """(q, depth) estimated similarities to (q, d) probes, best first, and rows; -1 where it found fewer."""


class Builder(Protocol):
    """Makes structures of one kind."""

    kind: Kind
    depths: tuple[int, ...]
    """How many candidates to look at, from the least effort to the greatest."""

    def build(self, vectors: Float, stopped: Callable[[], bool]) -> Structure:
        """Of (n, d) vectors, in slices.

        Raises:
            StoppedError: ``stopped`` said so between two of them.
        """


class StoppedError(Exception):
    """What was being built is not wanted any more."""


@dataclass(frozen=True)
class Recall:
    """Of ``sample`` probes made from the gallery's own vectors, each at the cosine ``similarity`` to one of them: how
    often the most similar vector was found, and which share of the ten most similar."""

    at_1: float
    at_10: float
    sample: int
    similarity: float
    promise: float


@dataclass(frozen=True)
class IndexStats:
    """What serves a gallery's searches: which engine and kind of index, why, of how many vectors, and how far it has
    followed the change log.

    ``tail``: vectors that are not in a sealed segment yet; ``tombstones``: that were removed and are still held;
    ``depth``: candidates that are compared exactly; ``recall``: None where every vector is; ``problem``: what was wrong
    with a file of the index, which was made anew.
    """

    engine: str
    kind: str
    reason: str
    vectors: int
    sequence: int
    segments: int = 0
    tail: int = 0
    tombstones: int = 0
    memory_bytes: int = 0
    depth: int | None = None
    recall: Recall | None = None
    compacted_at: datetime | None = None
    problem: str | None = None


class SharedEngine(Protocol):
    """Where indexes are that all nodes share."""

    def check(self) -> None:
        """Prove that it answers. Raises IndexUnavailableError."""

    def forget(self, gallery: Gallery) -> None:
        """Remove what it holds of a deleted gallery, sooner or later."""

"""Protocols and value types of the index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from models.runtime.network import Float
from service.domain.gallery import Gallery, Keys

Kind = Literal["exact", "compact"]


class Structure(Protocol):
    """Approximate search structure of one segment."""

    memory_bytes: int
    """Memory without the vectors."""

    def candidates(self, probes: Float, depth: int) -> tuple[Float, Keys]:
        """Return (q, depth) estimated similarities to (q, d) probes, best first, and their rows; -1 fills gaps."""


class Builder(Protocol):
    """Builder of structures of one kind."""

    kind: Kind
    depths: tuple[int, ...]
    """Numbers of candidates to try, ascending."""

    def build(self, vectors: Float, stopped: Callable[[], bool]) -> Structure:
        """Build a structure of (n, d) vectors, in slices.

        Raises:
            StoppedError: ``stopped`` returned true between two slices.
        """


class StoppedError(Exception):
    """Building was stopped because the index is closed."""


@dataclass(frozen=True)
class Recall:
    """Measured recall@1 and recall@10 (0 to 1).

    Attributes:
        sample_count: number of probes.
        similarity: cosine similarity of each probe to one of the gallery's vectors.
        promise: recall@1 that the gallery requires.
    """

    at_1: float
    at_10: float
    sample_count: int
    similarity: float
    promise: float


@dataclass(frozen=True)
class IndexStats:
    """State of a gallery's index.

    Attributes:
        tombstone_count: removed vectors still in memory.
        candidate_count: candidates compared exactly; None: all.
        recall: None while every vector is compared.
    """

    kind: Kind
    vector_count: int
    segment_count: int
    tombstone_count: int
    memory_bytes: int
    candidate_count: int | None
    recall: Recall | None
    compacted_at: datetime | None


class SharedEngine(Protocol):
    """Index engine shared by all nodes."""

    def check(self) -> None:
        """Check that the engine answers. Raises IndexUnavailableError."""

    def forget(self, gallery: Gallery) -> None:
        """Remove the rows of a deleted gallery, eventually."""

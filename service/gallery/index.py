"""What a vector index must do. Implementations hold vectors by template key and know nothing of SQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from models.runtime import Float
from service.gallery.subjects import Gallery


@dataclass(frozen=True)
class IndexStats:
    """What serves a gallery's searches: which engine and kind of index, why, of how many vectors, and how far it has
    followed the change log."""

    engine: str
    kind: str
    reason: str
    vectors: int
    sequence: int


class VectorIndex(Protocol):
    def __len__(self) -> int: ...

    def add(self, keys: Sequence[int], vectors: Float) -> None:
        """Add (n, d) unit vectors; a key already present is replaced."""

    def remove(self, keys: Sequence[int]) -> None:
        """Forget keys; unknown ones are passed over."""

    def search(self, probes: Float, k: int, among: NDArray[np.int64] | None = None) -> tuple[Float, NDArray[np.int64]]:
        """(q, d) probes to similarities (q, k), best first, and keys (q, k), -1 where fewer than k exist. ``among``
        restricts the search to these keys."""


class SharedEngine(Protocol):
    """Where indexes are that all nodes share."""

    def check(self) -> None:
        """Prove that it answers. Raises IndexUnavailableError."""

    def forget(self, gallery: Gallery) -> None:
        """Remove what it holds of a deleted gallery, sooner or later."""

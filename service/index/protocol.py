"""Protocols and value types of the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from models.runtime.network import Float
from service.domain.gallery import Gallery, Keys

Kind = Literal["exact", "compact"]
"""Whether every vector is compared, or the candidates that structures find."""


class Structure(Protocol):
    """Approximate search structure of one segment."""

    def candidates(self, probes: Float, depth: int) -> Keys:
        """Return (q, depth) rows that are similar to (q, d) probes, best first; -1 fills gaps."""


class Builder(Protocol):
    """Builder of structures."""

    depths: tuple[int, ...]
    """Numbers of candidates to try, ascending."""

    def build(self, vectors: Float, stopped: Callable[[], bool]) -> Structure:
        """Build a structure of (n, d) vectors, in slices.

        Raises:
            StoppedError: ``stopped`` returned true between two slices.
        """


class StoppedError(Exception):
    """Building was stopped because the index is closed."""


class SharedEngine(Protocol):
    """Index engine shared by all nodes."""

    def check(self) -> None:
        """Check that the engine answers. Raises IndexUnavailableError."""

    def forget(self, gallery: Gallery) -> None:
        """Remove the rows of a deleted gallery, eventually."""

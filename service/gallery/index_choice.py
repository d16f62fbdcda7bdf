"""Which kind of index suits a gallery, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from service.gallery.index import Kind
from service.gallery.subjects import IndexSetting

CODED_DIMENSIONS: Final = 4
"""Coded together: a vector's length must be a multiple of it."""


@dataclass(frozen=True)
class Sizes:
    """In vectors.

    ``seal``: a tail so long becomes a segment; ``compact_from``: from which comparing every vector takes long enough to
    be shortened; ``coded``, ``linked``: the longest segment of codes, or of a graph.
    """

    seal: int = 4096
    compact_from: int = 20_000
    coded: int = 262_144
    linked: int = 1_048_576

    def longest(self, kind: Kind) -> int:
        return self.linked if kind == "graph" else self.coded


@dataclass(frozen=True)
class Choice:
    kind: Kind
    reason: str


@dataclass(frozen=True)
class Failure:
    """A kind that did not keep its promise in a gallery of ``size``, however many candidates it looked at."""

    kind: Kind
    size: int
    recall: float
    promise: float


def choose(wanted: IndexSetting, size: int, dimension: int, sizes: Sizes, failed: Failure | None, now: Kind) -> Choice:
    """The kind for ``size`` vectors, given what failed before, and which one there is ``now``."""
    preferred = _preferred(wanted, size, sizes, now)
    if preferred.kind == "compact" and dimension % CODED_DIMENSIONS:
        return Choice("exact", f"vectors of {dimension} numbers cannot be coded by fours: every one is compared")
    # A gallery twice or half as large is another gallery: worth another try.
    if failed is not None and failed.kind == preferred.kind and failed.size < 2 * size and size < 2 * failed.size:
        return Choice(
            "exact",
            f"{failed.kind} found {failed.recall:.4f} of the most similar vectors, less than the {failed.promise:g} "
            "promised, however far it looked: every vector is compared",
        )
    return preferred


def _preferred(wanted: IndexSetting, size: int, sizes: Sizes, now: Kind) -> Choice:
    if wanted == "exact":
        return Choice("exact", "the gallery's setting: every vector is compared")
    if wanted != "auto":
        if size < sizes.seal:
            return Choice(
                "exact",
                f"the gallery's setting is {wanted}; with less than {sizes.seal:,} vectors, comparing "
                "every one is as fast",
            )
        return Choice(wanted, "the gallery's setting")
    # Not back and forth with each vector that comes and goes around the limit.
    limit = sizes.compact_from if now == "exact" else sizes.compact_from // 2
    if size < limit:
        return Choice("exact", f"{size:,} vectors, less than {limit:,}: comparing every one is fast")
    return Choice(
        "compact", f"{size:,} vectors, {limit:,} or more: codes find the candidates, which are compared exactly"
    )

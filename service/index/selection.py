"""Selection of the index kind for a gallery. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kith.wire.common import IndexSetting
from service.index.protocol import Kind

CODED_DIMENSIONS: Final = 4
"""Dimensions per code; the length of a vector must be a multiple of it."""


@dataclass(frozen=True)
class Sizes:
    """Size limits, in vectors.

    Attributes:
        seal: length at which the tail becomes a sealed segment.
        compact_from: gallery size from which ``auto`` selects the compact kind.
        max_length: maximum length of a segment.
    """

    seal: int = 4096
    compact_from: int = 20_000
    max_length: int = 262_144


@dataclass(frozen=True)
class Choice:
    """Selected kind, with the reason for people."""

    kind: Kind
    reason: str


@dataclass(frozen=True)
class Failure:
    """Kind whose recall stayed below the promise at every depth, in a gallery of ``size`` vectors."""

    kind: Kind
    size: int
    recall: float
    promise: float


def choose(wanted: IndexSetting, size: int, dimension: int, sizes: Sizes, failed: Failure | None, now: Kind) -> Choice:
    """Return the kind for ``size`` vectors. ``failed``: the last failure; ``now``: the current kind."""
    preferred = _preferred(wanted, size, sizes, now)
    if preferred.kind == "compact" and dimension % CODED_DIMENSIONS:
        return Choice(
            "exact", f"{dimension} is not a multiple of {CODED_DIMENSIONS} dimensions: every vector is compared"
        )
    # Retry once the gallery has doubled or halved.
    if failed is not None and failed.kind == preferred.kind and failed.size < 2 * size and size < 2 * failed.size:
        return Choice(
            "exact",
            f"{failed.kind} reached recall {failed.recall:.4f}, below the required {failed.promise:g}: "
            "every vector is compared",
        )
    return preferred


def _preferred(wanted: IndexSetting, size: int, sizes: Sizes, now: Kind) -> Choice:
    if wanted == "exact":
        return Choice("exact", "the gallery's setting: every vector is compared")
    if wanted == "compact":
        if size < sizes.seal:
            return Choice(
                "exact",
                f"the gallery's setting is compact; below {sizes.seal:,} vectors every vector is compared",
            )
        return Choice("compact", "the gallery's setting")
    # Hysteresis: avoid switching back and forth around the limit.
    limit = sizes.compact_from if now == "exact" else sizes.compact_from // 2
    if size < limit:
        return Choice("exact", f"{size:,} vectors, fewer than {limit:,}: every vector is compared")
    return Choice(
        "compact", f"{size:,} vectors, {limit:,} or more: codes select candidates, which are compared exactly"
    )

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


Failure = tuple[Kind, int]
"""Kind whose recall stayed below the promise at every depth, and the number of vectors then."""


def choose(wanted: IndexSetting, size: int, dimension: int, sizes: Sizes, failed: Failure | None, now: Kind) -> Kind:
    """Return the kind for ``size`` vectors. ``failed``: the last failure; ``now``: the current kind."""
    preferred = _preferred(wanted, size, sizes, now)
    if preferred == "compact" and dimension % CODED_DIMENSIONS:
        return "exact"
    # Retry once the gallery has doubled or halved.
    if failed is not None and failed[0] == preferred and failed[1] < 2 * size and size < 2 * failed[1]:
        return "exact"
    return preferred


def _preferred(wanted: IndexSetting, size: int, sizes: Sizes, now: Kind) -> Kind:
    if wanted == "exact":
        return "exact"
    if wanted == "compact":
        return "exact" if size < sizes.seal else "compact"
    # Hysteresis: avoid switching back and forth around the limit.
    limit = sizes.compact_from if now == "exact" else sizes.compact_from // 2
    return "exact" if size < limit else "compact"

"""Remembered strangers: unknown people with lasting ids, and the rule of visits. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from pydantic import Field

from kith.wire.strangers import SightingOut, StrangerOut
from models.runtime.network import Float

MAX_STRANGERS: Final = 5000
"""Strangers of a gallery. A new one replaces the one that was last seen the longest ago."""
MAX_TEMPLATES: Final = 4
"""Templates of a stranger."""
VISIT_GAP: Final = timedelta(minutes=10)
"""Longest time between two sightings of one visit."""
SIGHTING_STEP: Final = timedelta(minutes=1)
"""Precision of ``last_seen``: a face in front of a camera is written once in this time."""


class Stranger(StrangerOut):
    """Unknown person with a lasting ``id``."""

    pk: int = Field(exclude=True)

    def seen(self, now: datetime) -> Stranger:
        """Return the stranger after a sighting; the same if nothing is to be written."""
        if now - self.last_seen < SIGHTING_STEP:
            return self
        visits = self.seen_count + (now - self.last_seen > VISIT_GAP)
        return self.model_copy(update={"last_seen": now, "seen_count": visits})

    def sighting(self) -> dict[str, Any]:
        """Return a ``SightingOut`` as JSON."""
        return self.model_dump(mode="json", include=set(SightingOut.model_fields))


@dataclass(frozen=True)
class Nearest:
    """The most similar of the ``strangers`` that a face is compared with, which have ``mean_templates`` on average.

    ``key``: of its row. ``own`` reads its (n, d) templates.
    """

    key: int
    similarity: float
    strangers: int
    mean_templates: float
    own: Callable[[], Float]


Recalled = Literal["new", "unclear", "met", "diverse"]
"""What a face is.

new: it resembles no stranger, and founds one. unclear: it is between the thresholds, and founds none, so that one
person in front of a camera does not become many. met: it is of the nearest stranger. diverse: also, and so unlike the
stranger's templates that it becomes one.
"""

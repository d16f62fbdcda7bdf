"""Remembered strangers: unknown people with lasting ids, their templates, and the rule of visits. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np

from kith.wire.fields import rfc3339
from models.runtime.network import Float
from service.domain.fusion import Ints, subject_vectors

MAX_STRANGERS: Final = 5000
"""Strangers of a gallery. A new one replaces the one that was last seen the longest ago."""
MAX_TEMPLATES: Final = 4
"""Templates of a stranger. With MAX_STRANGERS, 40 MB of vectors of 512 numbers are compared in 5 ms."""
VISIT_GAP: Final = timedelta(minutes=10)
"""Longest time between two sightings of one visit."""
SIGHTING_STEP: Final = timedelta(minutes=1)
"""Precision of ``last_seen``: a face in front of a camera is written once in this time."""

SPARE_ROWS: Final = 64
"""Vectors that fit behind those of a gallery before all of them are copied."""


@dataclass(frozen=True)
class Stranger:
    """Unknown person with a lasting ``id``. ``seen_count``: number of visits."""

    pk: int
    id: str
    first_seen: datetime
    last_seen: datetime
    seen_count: int
    template_count: int = 0

    def seen(self, now: datetime) -> Stranger:
        """Return the stranger after a sighting; the same if nothing is to be written."""
        if now - self.last_seen < SIGHTING_STEP:
            return self
        visits = self.seen_count + (now - self.last_seen > VISIT_GAP)
        return replace(self, last_seen=now, seen_count=visits)

    def sighting(self) -> dict[str, Any]:
        """Return a ``SightingOut`` as JSON."""
        return {
            "id": self.id,
            "first_seen": rfc3339(self.first_seen),
            "last_seen": rfc3339(self.last_seen),
            "seen_count": self.seen_count,
        }


@dataclass(frozen=True)
class Recalled:
    """Remembered stranger that a face matches.

    ``stranger_pk``: that one. ``is_new``: it resembles none, and founds a stranger. Neither: it is between the
    thresholds, and founds none, so that one person in front of a camera does not become many. ``is_diverse``: the
    stranger gets it as a further template.
    """

    stranger_pk: int | None = None
    is_new: bool = False
    is_diverse: bool = False


@dataclass(frozen=True, eq=False)
class Remembered:
    """Strangers of a gallery by key, and their templates in the order of the strangers' keys.

    ``template_pks`` and ``stranger_pks`` are (m,), ``vectors`` (m, d) unit vectors, ``qualities`` (m,) scores in
    [0, 1]. ``version`` is different after each change of a template; 0: there never was one. ``hidden``: keys of
    strangers that no face is compared with.
    """

    version: int
    strangers: Mapping[int, Stranger]
    template_pks: Ints
    stranger_pks: Ints
    vectors: Float
    qualities: Float
    hidden: frozenset[int] = frozenset()
    _means: list[Float] = field(default_factory=list)  # computed at the first comparison, shared by copies

    @classmethod
    def none(cls, dimension: int) -> Remembered:
        no_keys, no_vectors = np.empty(0, np.int64), np.empty((0, dimension), np.float32)
        return cls(0, {}, no_keys, no_keys, no_vectors, np.empty(0, np.float32))

    def with_stranger(self, changed: Stranger) -> Remembered:
        return replace(self, strangers={**self.strangers, changed.pk: changed})

    def with_template(self, version: int, stranger_pk: int, pk: int, vector: Float, quality: float) -> Remembered:
        """Return the strangers after one of them, known or new, got a template with the highest key."""
        first, end = (int(np.searchsorted(self.stranger_pks, stranger_pk, side)) for side in ("left", "right"))
        keys = np.insert(self.template_pks, end, pk)
        owners = np.insert(self.stranger_pks, end, stranger_pk)
        vectors, qualities = _with_row(self.vectors, end, vector), np.insert(self.qualities, end, quality)
        own = slice(first, end + 1)
        place = int(np.searchsorted(self._keys(), stranger_pk))
        means: list[Float] = []
        if self._means:
            (mean,) = subject_vectors(vectors[own], owners[own], qualities[own])
            if first == end:
                means = [_with_row(self._means[0], place, mean)]
            else:
                means = [self._means[0].copy()]
                means[0][place] = mean
        return Remembered(version, self.strangers, keys, owners, vectors, qualities, self.hidden, means)

    def hiding(self, pks: Collection[int]) -> Remembered:
        """Return the strangers, of which these are not compared."""
        return replace(self, hidden=self.hidden | set(pks))

    def without(self, pks: Collection[int]) -> Remembered:
        """Return the strangers after these were deleted."""
        if not pks:
            return self
        kept = ~np.isin(self.stranger_pks, list(pks))
        people = {pk: one for pk, one in self.strangers.items() if pk not in pks}
        is_left = ~np.isin(self._keys(), list(pks))
        return Remembered(
            self.version,
            people,
            self.template_pks[kept],
            self.stranger_pks[kept],
            self.vectors[kept],
            self.qualities[kept],
            self.hidden.difference(pks),
            [means[is_left] for means in self._means],
        )

    def compared_templates(self) -> int:
        """Count the templates of the strangers that are not hidden."""
        return int((~np.isin(self.stranger_pks, list(self.hidden))).sum())

    def similarities(self, vector: Float) -> tuple[Ints, Float]:
        """Return the (s,) ascending keys of the strangers compared, and their (s,) fused similarities to a (d,) unit
        vector."""
        if not self._means:
            self._means.append(subject_vectors(self.vectors, self.stranger_pks, self.qualities))
        keys = self._keys()
        compared = ~np.isin(keys, list(self.hidden))
        return keys[compared], (self._means[0] @ vector)[compared]

    def _keys(self) -> Ints:
        is_first = np.diff(self.stranger_pks, prepend=-1) != 0
        keys: Ints = self.stranger_pks[is_first]
        return keys


def _with_row(rows: Float, place: int, row: Float) -> Float:
    """Return (m + 1, d) rows with a new one.

    At the end, it goes into spare room of the same memory: a photo of many new faces copies the vectors once. ``rows``
    keeps its rows, but a second row at its end would replace the first.
    """
    room = rows.base
    if room is None or place < len(rows) or len(room) == len(rows):
        room = np.empty((len(rows) + SPARE_ROWS, rows.shape[1]), rows.dtype)
        room[:place], room[place + 1 : len(rows) + 1] = rows[:place], rows[place:]
    room[place] = row
    return room[: len(rows) + 1]

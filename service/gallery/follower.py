"""An index that follows a gallery's change log: before a search it applies whatever was committed since."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from models.network import Float
from service.gallery.index import IndexStats, Keys
from service.gallery.subjects import Gallery, GallerySettings, Hit

BYTES_PER_GALLERY: Final = 10_000
BYTES_PER_NUMBER: Final = 5
"""Of a vector: four, and what lies beside them."""


class Replica(Protocol):
    """One gallery, searchable by its rule of fusion. Safe to share between threads."""

    def catch_up(self, version: int | None = None) -> None:
        """Apply what was committed since the last call: every acknowledged write, of this process or another, that came
        before this call is seen by a search that comes after it. ``version``: that the gallery had just now; who has
        come so far already need not look."""

    def is_at(self, version: int) -> bool:
        """Whether :meth:`catch_up` to this version of the gallery would have nothing to do."""

    def search(self, probes: Float, k: int, among: Keys | None) -> tuple[list[list[Hit]], int]:
        """As :meth:`Follower.search`, of what was caught up with."""

    def stats(self) -> IndexStats:
        """What it is at this moment."""

    def sequence(self) -> int | None:
        """Up to which line of the change log it was last known to have come, in no time; None: it has not begun."""

    def close(self) -> None:
        """Give back what it holds, without waiting. Nothing is begun afterwards, but what is under way may still come
        to its end."""


class Follower:
    """The searchable replica of one gallery. Safe to share between threads."""

    def __init__(self, gallery: Gallery, replica: Replica) -> None:
        self.name = gallery.name
        self.settings = gallery.settings
        self.caught_up = False
        """Once at least: from then on there is little to catch up with."""
        self._replica = replica

    def catch_up(self, version: int | None = None) -> None:
        """As :meth:`Replica.catch_up`. Blocks for as long as a gallery takes that is yet to be loaded."""
        self._replica.catch_up(version)
        self.caught_up = True

    def is_at(self, version: int) -> bool:
        return self._replica.is_at(version)

    def search(
        self, probes: Float, k: int, among: Keys | None = None, version: int | None = None
    ) -> tuple[list[list[Hit]], int]:
        """The ``k`` best subjects for each of (q, d) probes by the gallery's fusion, best first, exactly as brute force
        finds them; and how many subjects each probe was compared with (one without templates is not). ``among``
        restricts the search to subjects of these ascending keys; ``version``: as of :meth:`Replica.catch_up`."""
        self.catch_up(version)
        return self._replica.search(probes, k, among)

    def stats(self) -> IndexStats:
        """Of the index as it stands after catching up."""
        self.catch_up()
        return self._replica.stats()

    def sequence(self) -> int | None:
        """As :meth:`Replica.sequence`: it is not caught up with before."""
        return self._replica.sequence() if self.caught_up else None

    def close(self) -> None:
        self._replica.close()


class Followers:
    """One follower for each gallery and generation in use, made on first search by ``make_replica``, and made anew when
    a setting that its index depends on is another. Those searched least lately go when all vectors together would need
    more than ``memory`` bytes; None: they stay. ``forget``: what else to do about a gallery that was deleted."""

    def __init__(
        self,
        make_replica: Callable[[Gallery], Replica],
        memory: int | None = None,
        forget: Callable[[Gallery], None] | None = None,
    ) -> None:
        self._make_replica = make_replica
        self._memory = memory
        self._forget = forget
        self._followers: OrderedDict[tuple[int, int], Follower] = OrderedDict()
        self._held: dict[tuple[int, int], int] = {}
        self._total = 0
        self._lock = threading.Lock()

    def of(self, gallery: Gallery) -> Follower:
        """``gallery`` as read for this request: its settings may have been changed by another process."""
        key = (gallery.pk, gallery.generation)
        wanted = {gallery.generation, gallery.current_generation, gallery.other.number if gallery.other else -1}
        gone: list[Follower] = []
        with self._lock:
            # After the last search under a recogniser that was dropped, here or by another process.
            for dropped in [k for k in self._followers if k[0] == gallery.pk and k[1] not in wanted]:
                gone += self._taken_out(dropped)
            follower = self._followers.get(key)
            if follower is None or _index_settings(follower.settings) != _index_settings(gallery.settings):
                gone += self._taken_out(key)
                follower = self._followers[key] = Follower(gallery, self._make_replica(gallery))
            self._followers.move_to_end(key)
            self._hold(key, BYTES_PER_GALLERY + gallery.templates * gallery.dimension * BYTES_PER_NUMBER)
            while self._memory is not None and self._total > self._memory and len(self._followers) > 1:
                gone += self._taken_out(next(iter(self._followers)))
        _close(gone)
        return follower

    def drop(self, gallery: Gallery) -> None:
        """Forget a deleted gallery in all its generations."""
        with self._lock:
            gone = [each for key in list(self._followers) if key[0] == gallery.pk for each in self._taken_out(key)]
        _close(gone)
        if self._forget is not None:
            self._forget(gallery)

    def close(self) -> None:
        with self._lock:
            gone = [each for key in list(self._followers) for each in self._taken_out(key)]
        _close(gone)

    def sequences(self) -> dict[tuple[int, str], int]:
        """How far the indexes that were searched have come, by the gallery's key and name; of two generations the one
        that is behind."""
        with self._lock:
            followers = [(pk, follower) for (pk, _), follower in self._followers.items()]
        come: dict[tuple[int, str], int] = {}
        for pk, follower in followers:
            if (sequence := follower.sequence()) is not None:
                come[pk, follower.name] = min(sequence, come.get((pk, follower.name), sequence))
        return come

    def __len__(self) -> int:
        return len(self._followers)

    def _hold(self, key: tuple[int, int], size: int) -> None:
        self._total += size - self._held.get(key, 0)
        self._held[key] = size

    def _taken_out(self, key: tuple[int, int]) -> list[Follower]:
        """The follower of this key, if any, for the caller to close once the lock of all galleries is given back."""
        if key not in self._followers:
            return []
        self._total -= self._held.pop(key, 0)
        return [self._followers.pop(key)]


def _close(followers: list[Follower]) -> None:
    for follower in followers:
        follower.close()


def _index_settings(settings: GallerySettings) -> tuple[object, ...]:
    return settings.fusion, settings.index, settings.recall

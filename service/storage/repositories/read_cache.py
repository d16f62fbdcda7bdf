"""Caches of what was read of galleries. The gallery's version, which is random, is part of each key.

So nothing is invalidated: old values leave as the least recently used. Erasures evict them at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final, Generic, TypeVar

from cachetools import LRUCache

from service.domain.findings import HygieneReport
from service.domain.gallery import Gallery, SubjectLabel

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
MAX_GALLERIES: Final = 1000
MAX_NAMES: Final = 200_000
"""Names of all galleries together, about 400 bytes each."""
MAX_FINDINGS: Final = 100_000
"""Findings of all galleries together, about 500 bytes each: keys and similarities, no names."""


class VersionedCache(Generic[Key, Value]):
    """LRU cache of values by gallery, its version and a key. Thread-safe.

    ``room``: sum of the ``size`` of all values, each at least 1. A value that is larger is not kept.
    """

    def __init__(self, room: int, size: Callable[[Value], int] = lambda _: 1) -> None:
        self._size = size
        self._values: LRUCache[tuple[str, int, Key], Value] = LRUCache(room, lambda value: max(1, size(value)))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, gallery: Gallery, keys: Iterable[Key]) -> dict[Key, Value]:
        """Return the values that are cached of exactly this version of the gallery."""
        with self._lock:
            found = ((key, self._values.get((gallery.name, gallery.version, key))) for key in keys)
            return {key: value for key, value in found if value is not None}

    def put(self, gallery: Gallery, values: Mapping[Key, Value]) -> None:
        """Cache values as of this version of the gallery, or later."""
        with self._lock:
            for key, value in values.items():
                if self._size(value) <= self._values.maxsize:
                    self._values[gallery.name, gallery.version, key] = value

    def keep(self, holds: Callable[[str, int], bool]) -> None:
        """Evict the values of other galleries, by name, and versions."""
        with self._lock:
            keys = list(self._values)
        stale = [key for key in keys if not holds(key[0], key[1])]
        with self._lock:
            for key in stale:
                self._values.pop(key, None)


class ReadCache:
    """Galleries as last read, with ids and names of subjects by row key, and findings.

    ``file_version``: version of the database file, which any write changes; None of PostgreSQL.
    """

    def __init__(self, file_version: Callable[[], int | None]) -> None:
        self._file_version = file_version
        self.names = VersionedCache[int, SubjectLabel](MAX_NAMES)
        self.findings = VersionedCache[None, HygieneReport](MAX_FINDINGS, len)
        self._galleries: LRUCache[str, tuple[Gallery, int | None]] = LRUCache(MAX_GALLERIES)
        self._lock = threading.Lock()

    def current(self, name: str) -> Gallery | None:
        """Return a gallery, in microseconds, if the database file did not change since it was read."""
        with self._lock:
            gallery, file_version = self._galleries.get(name) or (None, None)
        return None if file_version is None or file_version != self._file_version() else gallery

    def latest(self, name: str) -> Gallery | None:
        """Return a gallery as it was last read."""
        with self._lock:
            found = self._galleries.get(name)
        return None if found is None else found[0]

    def put(self, gallery: Gallery, file_version: int | None) -> None:
        """Cache a gallery that was read after ``file_version`` was.

        A slow reader may put an outdated gallery. The next check of the file's or the gallery's version detects it.
        """
        with self._lock:
            self._galleries[gallery.name] = gallery, file_version

    def evict(self, name: str) -> None:
        """Evict a gallery, with all that is cached of it."""
        self.evict_all_but(lambda other, _: other != name)

    def evict_all_but(self, holds: Callable[[str, int], bool]) -> None:
        """Evict galleries whose name and version are not current, and what is cached of these and earlier versions."""
        with self._lock:
            for name, (gallery, _) in list(self._galleries.items()):
                if not holds(name, gallery.version):
                    del self._galleries[name]
        for cache in (self.names, self.findings):
            cache.keep(holds)

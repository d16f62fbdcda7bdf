"""Recent probes of each gallery and caller, as two similarity levels each. No photos, vectors or subject keys.

A caller's probes change only this caller's thresholds: unusual photos do not raise those of others.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kith.wire.common import Fusion
from models.risk.probe_shift import MIN_PROBES, RowLevels
from service.domain.gallery import Gallery
from service.risk.drift import standard_error

WINDOW_PROBES: Final = 400
MAX_AGE_S: Final = 24 * 3600.0
MAX_WINDOWS: Final = 1000
"""Galleries and callers with a window, about 50 kB each."""
MAX_PROBES_AT_ONCE: Final = 64
"""Probes of one request that are added."""
SAMPLED: Final = 4
"""A full window takes the probes of one in so many requests."""


@dataclass
class _Window:
    name: str
    probes: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_PROBES))
    """Time in seconds, and the two levels."""
    requests: int = 0
    unlike_gallery: bool = False
    levels: RowLevels | None = None
    expires_s: float = 0.0
    """Time at which ``levels`` must be computed again."""


_Key = tuple[int, int, Fusion, str]


class ProbeWindows:
    """Windows of the latest WINDOW_PROBES probes of a day. Safe to share between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: OrderedDict[_Key, _Window] = OrderedDict()
        self._lock = threading.Lock()

    def wanted(self, gallery: Gallery, caller: str, count: int) -> int:
        """Return how many of ``count`` probes of a request to add."""
        with self._lock:
            window = self._windows.get(_key(gallery, caller))
            if window is None or len(window.probes) < WINDOW_PROBES:
                return min(count, MAX_PROBES_AT_ONCE)
            window.requests += 1
            return min(count, MAX_PROBES_AT_ONCE) if window.requests % SAMPLED == 0 else 0

    def add(self, gallery: Gallery, caller: str, levels: NDArray[np.float64]) -> None:
        """Add the (n, 2) levels of a request's probes."""
        now = self._clock()
        with self._lock:
            window = self._windows.setdefault(_key(gallery, caller), _Window(gallery.name))
            self._windows.move_to_end(_key(gallery, caller))
            window.probes.extend((now, lower, upper) for lower, upper in levels.tolist())
            window.expires_s = 0.0
            if len(self._windows) > MAX_WINDOWS:
                self._windows.popitem(last=False)

    def levels(self, gallery: Gallery, caller: str) -> RowLevels | None:
        """Return the levels of the caller's recent probes; None for fewer than MIN_PROBES."""
        with self._lock:
            window = self._windows.get(_key(gallery, caller))
            return None if window is None else self._levels(window)

    def levels_of_callers(self, gallery: Gallery) -> list[RowLevels]:
        """Return the levels of each caller with at least MIN_PROBES."""
        with self._lock:
            windows = [window for key, window in self._windows.items() if key[:3] == _key(gallery, "")[:3]]
            return [levels for window in windows if (levels := self._levels(window)) is not None]

    def mark(self, gallery: Gallery, caller: str, unlike: bool) -> None:
        """Record whether the caller's latest thresholds are those of probes unlike the gallery."""
        with self._lock:
            if (window := self._windows.get(_key(gallery, caller))) is not None:
                window.unlike_gallery = unlike

    def unlike_galleries(self) -> dict[str, bool]:
        """Return by gallery name whether the probes of a caller are unlike the gallery."""
        unlike: dict[str, bool] = {}
        with self._lock:
            for window in self._windows.values():
                recent = self._levels(window) is not None
                unlike[window.name] = unlike.get(window.name, False) or (recent and window.unlike_gallery)
        return unlike

    def forget(self, gallery: Gallery) -> None:
        """Delete the windows of a deleted gallery."""
        with self._lock:
            for key in [key for key in self._windows if key[0] == gallery.pk]:
                del self._windows[key]

    def _levels(self, window: _Window) -> RowLevels | None:
        now = self._clock()
        if now < window.expires_s:
            return window.levels
        while window.probes and window.probes[0][0] <= now - MAX_AGE_S:
            window.probes.popleft()
        window.levels, window.expires_s = None, float("inf")
        if window.probes:
            window.expires_s = window.probes[0][0] + MAX_AGE_S
        if len(window.probes) >= MIN_PROBES:
            values = np.array(window.probes)[:, 1:]
            independent = RowLevels.of(values)
            errors = [standard_error(column, error) for column, error in zip(values.T, independent.errors, strict=True)]
            window.levels = RowLevels(independent.means, (errors[0], errors[1]))
        return window.levels


def _key(gallery: Gallery, caller: str) -> _Key:
    return gallery.pk, gallery.generation, gallery.settings.fusion, caller

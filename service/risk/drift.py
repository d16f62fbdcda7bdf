"""Drift detection: compare recent decisions of a gallery with its calibration.

Keeps outcomes and similarities in memory; no photos, no vectors, no subject ids.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from kith.wire.common import DriftState, IdentifyOutcome
from kith.wire.galleries import ComparisonOut, DriftOut
from models.risk.calibration import BIN_WIDTH, Calibration, GenuineMoments
from service.core.errors import GalleryNotFoundError
from service.core.periodic import PeriodicTask
from service.domain.events import Event
from service.storage.audit.log import record_entries
from service.storage.repositories.store import Store

STATES: Final[tuple[DriftState, ...]] = get_args(DriftState)
WINDOW: Final = 1000
"""Recent decisions, compared with the calibration."""
MIN_IDENTIFIED: Final = 100
"""Minimum of identified faces for a statement."""
WATCH_Z: Final = 3.0
DRIFT_Z: Final = 4.0
"""Standard errors. Without drift, ``drifted`` occurs in under 0.1 % of checks, ``watch`` or ``drifted`` in under 1 %
 (tests/service/risk/test_drift.py)."""
DRIFT_DIGITS: Final = 2
"""Decimals of reported means. With more, two means would reveal the exact similarity of the search between them."""
BLOCK: Final = 25
"""Consecutive decisions averaged in :func:`standard_error`, because they often show the same person."""
INTERVAL_S: Final = 60.0
"""Time between two looks for changes to report."""
REPORTED: Final[frozenset[DriftState]] = frozenset({"watch", "drifted"})
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decided:
    """One decision. ``similarity`` and ``threshold``: None if no search was made."""

    outcome: IdentifyOutcome
    similarity: float | None = None
    threshold: float | None = None


class Watch:
    """Recent decisions of one gallery. Safe to share between threads."""

    def __init__(self, calibration: Calibration | None) -> None:
        self._expected = None if calibration is None else cache(calibration.genuine_at_or_above)
        self._latest: deque[Decided] = deque(maxlen=WINDOW)
        self._counts: Counter[IdentifyOutcome] = Counter()
        self._lock = threading.Lock()

    def add(self, decisions: Iterable[Decided]) -> None:
        """Record decisions."""
        kept = list(decisions)
        with self._lock:
            self._latest.extend(kept)
            self._counts.update(one.outcome for one in kept)

    def drift(self) -> DriftOut:
        """Return the drift of the recent decisions: identified faces against the calibration's pairs above the same
        thresholds.

        Only lower similarities count: subjects with several templates score higher than pairs. False positives lower
        the mean too, at a high accepted risk.
        """
        with self._lock:
            window, counts = list(self._latest), dict(self._counts)
        mated = self._mated(window)
        state, detail = _judged(mated)
        if mated is not None:
            rounded = {"observed": round(mated.observed, DRIFT_DIGITS), "z": round(mated.z, 1)}
            mated = mated.model_copy(update=rounded)
        return DriftOut(
            state=state,
            detail=detail,
            window_counts=Counter(one.outcome for one in window),
            since_start_counts=counts,
            mated_similarity=mated,
        )

    def _mated(self, window: Sequence[Decided]) -> ComparisonOut | None:
        if self._expected is None:
            return None
        known = list[tuple[float, GenuineMoments]]()
        for one in window:
            if one.outcome == "identified" and one.similarity is not None and one.threshold is not None:
                # Searches have thresholds of their own, which fall into few bins.
                expected = self._expected(math.ceil(one.threshold / BIN_WIDTH - 1e-6) * BIN_WIDTH)
                if expected is not None:
                    known.append((one.similarity, expected))
        if len(known) < MIN_IDENTIFIED:
            return None
        observed = np.array([similarity for similarity, _ in known])
        means = np.array([mated.mean for _, mated in known])
        variances = np.array([mated.deviation**2 for _, mated in known])
        error = standard_error(observed - means, float(variances.sum()) ** 0.5 / len(known))
        difference = float(observed.mean()) - float(means.mean())
        z = difference / error if error > 0 else 0.0
        return ComparisonOut(observed=float(observed.mean()), expected=float(means.mean()), z=z)


class Watches:
    """Watches of all galleries searched by this process. ``calibrations``: by recognizer fingerprint."""

    def __init__(self, calibrations: Mapping[str, Calibration | None]) -> None:
        self._calibrations = dict(calibrations)
        self._watches: dict[int, tuple[str, str, Watch]] = {}
        self._lock = threading.Lock()

    def of(self, gallery_pk: int, name: str, fingerprint: str) -> Watch:
        """Return the watch of a gallery and recognizer."""
        with self._lock:
            _, of, watch = self._watches.get(gallery_pk, (name, "", None))
            if watch is None or of != fingerprint:
                watch = Watch(self._calibrations.get(fingerprint))
                self._watches[gallery_pk] = name, fingerprint, watch
            return watch

    def drift_of(self, gallery_pk: int, fingerprint: str) -> DriftOut:
        """Return the drift of a gallery without creating a watch."""
        with self._lock:
            _, of, watch = self._watches.get(gallery_pk, ("", "", None))
        return (watch if watch is not None and of == fingerprint else Watch(None)).drift()

    def drop(self, gallery_pks: Collection[int]) -> None:
        """Delete the watches of deleted galleries."""
        with self._lock:
            for pk in gallery_pks:
                self._watches.pop(pk, None)

    def watched(self) -> dict[int, tuple[str, Watch]]:
        """Return the name and watch of each gallery by its key, ascending."""
        with self._lock:
            return {pk: (name, watch) for pk, (name, _, watch) in sorted(self._watches.items())}

    def drifts(self) -> dict[str, DriftOut]:
        """Return the drift of each gallery by name, of equal names the latest."""
        return {name: watch.drift() for name, watch in dict(self.watched().values()).items()}


class DriftReports(PeriodicTask):
    """Task that reports to webhooks: one event whenever a gallery's drift changes for the worse, or ends."""

    def __init__(self, store: Store, watches: Watches, interval_s: float = INTERVAL_S) -> None:
        super().__init__(interval_s, "drift is not reported", log)
        self._store = store
        self._watches = watches
        self._reported: dict[int, DriftState | None] = {}
        """Last reported state by gallery key; None: there was no drift."""

    async def _look(self) -> None:
        await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Report all changes since the last call; blocks. Raises StorageError, MasterKeyError."""
        for pk, (name, watch) in self._watches.watched().items():
            drift = watch.drift()
            before, now = self._reported.get(pk), drift.state if drift.state in REPORTED else None
            if before == now:
                continue
            with suppress(GalleryNotFoundError):
                gallery = self._store.galleries.get(name)
                if gallery.pk == pk and gallery.webhooks:
                    event = Event("drift", {"state": drift.state, "detail": drift.detail})
                    record_entries(self._store.database, [], [(gallery, [event])])
            self._reported[pk] = now


def standard_error(values: NDArray[np.float64], independent: float) -> float:
    """Return the standard error of the mean of (n,) values.

    The maximum of ``independent``, the error for independent values, and the error from the means of blocks: one
    person before a camera gives many similar values in a row.
    """
    blocks = len(values) // BLOCK
    if blocks < 2:
        return independent
    means = values[-blocks * BLOCK :].reshape(blocks, BLOCK).mean(1)
    return max(independent, float(means.std(ddof=1)) / math.sqrt(blocks))


def _judged(mated: ComparisonOut | None) -> tuple[DriftState, str]:
    if mated is None:
        return "too_few", f"fewer than {MIN_IDENTIFIED} identified faces so far"
    if mated.z > -WATCH_Z:
        return "ok", "as expected"
    return "drifted" if mated.z <= -DRIFT_Z else "watch", (
        f"identified faces score {mated.observed:.{DRIFT_DIGITS}f} on average, and the calibration expects "
        f"{mated.expected:.3f}: enroll newer photos, check the camera, or calibrate on your own photos"
    )

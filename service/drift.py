"""Are a gallery's decisions still what its calibration expects? Counts and similarities of the latest ones, in this
process's memory: no photos, no vectors, no names of people. Pure."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from models.risk import Calibration, Mated
from service.decision import IdentifyOutcome

DriftState = Literal["too_few", "ok", "watch", "drifted"]
STATES: Final[tuple[DriftState, ...]] = ("too_few", "ok", "watch", "drifted")
SEARCHED: Final[frozenset[IdentifyOutcome]] = frozenset({"identified", "uncertain", "unknown"})
"""The outcomes of faces that came to a search."""

WINDOW: Final = 1000
"""Decisions: the latest are compared with what calibration expects, and with as many before them."""
FEWEST: Final = 100
"""Identified faces, or searches in each of two windows, below which nothing is said."""
WATCH_Z: Final = 3.0
DRIFT_Z: Final = 4.0
"""Standard errors. Asked at any one moment, decisions that have not changed are called drifted less than once in a
thousand times and watch or drifted less than once in a hundred (tests/service/test_drift.py)."""
DRIFT_DIGITS: Final = 2
"""Decimals of means in answers: with more, the mean before and after a search gives its exact similarity."""
BLOCK: Final = 25
"""Decisions in a row, which often show the same person: see :func:`standard_error`."""


@dataclass(frozen=True)
class Decided:
    """One decision: ``similarity`` and ``threshold`` where a search was made whose similarity counts."""

    outcome: IdentifyOutcome
    similarity: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A mean of the window, what it should be, and the distance between the two in standard errors."""

    observed: float
    expected: float
    z: float


@dataclass(frozen=True)
class Drift:
    """What the latest decisions say.

    Attributes:
        state: the worse of what ``mated`` (too low) and ``unknown`` (changed) say; ``detail`` says it in words.
        window: the latest decisions by outcome; ``since_start``: all since the process started.
        mated: similarities of the identified, beside what the calibration's same-person pairs above the thresholds
            that decided them would have; None while there are too few, or without calibration. Only lower ones are
            called a drift: a person of several templates scores higher than a pair does. Strangers called somebody
            lower them too, where the accepted risk is large or the threshold low.
        unknown: share of the searches that found nobody, beside that of the window before; None while there are too
            few.
    """

    state: DriftState
    detail: str
    window: dict[IdentifyOutcome, int] = field(default_factory=dict)
    since_start: dict[IdentifyOutcome, int] = field(default_factory=dict)
    mated: Comparison | None = None
    unknown: Comparison | None = None


@dataclass(frozen=True)
class _Kept:
    outcome: IdentifyOutcome
    similarity: float = 0.0
    expected: Mated | None = None


class Watch:
    """The latest decisions of one gallery. Safe to share between threads."""

    def __init__(self, calibration: Calibration | None) -> None:
        # Thresholds recur: a gallery's changes with its size alone.
        self._expected = None if calibration is None else lru_cache(maxsize=64)(calibration.mated_above)
        self._latest: deque[_Kept] = deque(maxlen=2 * WINDOW)
        self._counts: Counter[IdentifyOutcome] = Counter()
        self._known: Drift | None = None
        self._lock = threading.Lock()

    def add(self, decisions: Iterable[Decided]) -> None:
        kept = [self._kept(decided) for decided in decisions]
        with self._lock:
            self._latest.extend(kept)
            self._counts.update(one.outcome for one in kept)
            self._known = None

    def drift(self) -> Drift:
        with self._lock:
            if self._known is not None:  # nothing was decided since
                return self._known
            latest, counts = list(self._latest), dict(self._counts)
        found = self._drift_of(latest, counts)
        with self._lock:
            if sum(self._counts.values()) == sum(counts.values()):
                self._known = found
        return found

    @staticmethod
    def _drift_of(latest: Sequence[_Kept], counts: dict[IdentifyOutcome, int]) -> Drift:
        window = latest[-WINDOW:]
        half = min(WINDOW, len(latest) // 2)
        mated = _mated(window)
        unknown = _unknown(latest[-2 * half : -half], latest[-half:]) if half else None
        state, detail = _judged(mated, unknown)
        return Drift(state, detail, dict(Counter(one.outcome for one in window)), counts, mated, unknown)

    def _kept(self, decided: Decided) -> _Kept:
        if self._expected is None or decided.outcome != "identified":
            return _Kept(decided.outcome)
        if decided.similarity is None or decided.threshold is None:
            return _Kept(decided.outcome)
        return _Kept(decided.outcome, decided.similarity, self._expected(decided.threshold))


class Watches:
    """One watch per gallery that was searched since the process started, by its key and name; ``calibrations`` by
    recogniser, whose similarities are compared with nobody else's."""

    def __init__(self, calibrations: Mapping[str, Calibration | None]) -> None:
        self._calibrations = dict(calibrations)
        self._watches: dict[str, tuple[int, str, Watch]] = {}
        self._dropped: deque[int] = deque(maxlen=WINDOW)
        self._lock = threading.Lock()

    def of(self, gallery_pk: int, name: str, fingerprint: str) -> Watch:
        """A gallery's watch, of what one recogniser decided. A gallery that was deleted, here or by another process,
        gives its name to the next."""
        with self._lock:
            pk, of, watch = self._watches.get(name, (-1, fingerprint, None))
            if watch is not None and (pk, of) == (gallery_pk, fingerprint):
                return watch
            new = Watch(self._calibrations.get(fingerprint))
            # A search that ends after its gallery was deleted must not bring it back.
            if gallery_pk >= pk and gallery_pk not in self._dropped:
                self._watches[name] = (gallery_pk, fingerprint, new)
            return new

    def drift_of(self, gallery_pk: int, name: str, fingerprint: str) -> Drift:
        """Of a gallery that may never have been searched; asking does not make a watch."""
        with self._lock:
            pk, of, watch = self._watches.get(name, (-1, "", None))
        return (watch if watch is not None and (pk, of) == (gallery_pk, fingerprint) else Watch(None)).drift()

    def drop(self, gallery_pk: int, name: str) -> None:
        with self._lock:
            self._dropped.append(gallery_pk)
            if self._watches.get(name, (-1, "", None))[0] == gallery_pk:
                del self._watches[name]

    def known(self) -> dict[str, int]:
        """The key of the gallery that each watch is of, by its name."""
        with self._lock:
            return {name: pk for name, (pk, *_) in self._watches.items()}

    def drifts(self) -> dict[str, Drift]:
        """By the gallery's name."""
        with self._lock:
            watches = {name: watch for name, (*_, watch) in self._watches.items()}
        return {name: watch.drift() for name, watch in watches.items()}


def standard_error(values: NDArray[np.float64], independent: float) -> float:
    """Of the mean of (n,) values: ``independent``, that of values which have nothing to do with each other, or what
    blocks of 25 in a row show where that is more. One person before a camera gives many values that are alike."""
    blocks = len(values) // BLOCK
    if blocks < 2:
        return independent
    means = values[-blocks * BLOCK :].reshape(blocks, BLOCK).mean(1)
    return max(independent, float(means.std(ddof=1)) / math.sqrt(blocks))


def _mated(window: Sequence[_Kept]) -> Comparison | None:
    known = [(one.similarity, one.expected) for one in window if one.expected is not None]
    if len(known) < FEWEST:
        return None
    observed = np.array([similarity for similarity, _ in known])
    expected = np.array([mated.mean for _, mated in known])
    variances = np.array([mated.deviation**2 for _, mated in known])
    error = standard_error(observed - expected, float(variances.sum()) ** 0.5 / len(known))
    return _compared(float(observed.mean()), float(expected.mean()), error)


def _unknown(before: Sequence[_Kept], after: Sequence[_Kept]) -> Comparison | None:
    """The two-proportion test."""
    was, is_now = (
        np.array([one.outcome == "unknown" for one in part if one.outcome in SEARCHED], np.float64)
        for part in (before, after)
    )
    if min(len(was), len(is_now)) < FEWEST:
        return None
    pooled = float(np.concatenate([was, is_now]).mean())
    errors = [standard_error(part, (pooled * (1 - pooled) / len(part)) ** 0.5) for part in (was, is_now)]
    return _compared(float(is_now.mean()), float(was.mean()), math.hypot(*errors))


def _compared(observed: float, expected: float, error: float) -> Comparison:
    return Comparison(observed, expected, (observed - expected) / error if error > 0 else 0.0)


def _judged(mated: Comparison | None, unknown: Comparison | None) -> tuple[DriftState, str]:
    found: list[tuple[DriftState, str]] = []
    if mated is not None and (state := _state(-mated.z)) != "ok":
        found.append(
            (
                state,
                f"those identified score {mated.observed:.{DRIFT_DIGITS}f} on average where the calibration expects "
                f"{mated.expected:.3f}: enrol newer photos, look at the camera, or calibrate on photos of your own",
            )
        )
    if unknown is not None and (state := _state(abs(unknown.z))) != "ok":
        found.append(
            (
                state,
                f"{unknown.observed:.1%} of the searches find nobody, {unknown.expected:.1%} in the window before: "
                "other people come, or the photos have changed",
            )
        )
    if found:
        worst = max((state for state, _ in found), key=STATES.index)
        return worst, "; ".join(text for _, text in found)
    if mated is None and unknown is None:
        return "too_few", f"fewer than {FEWEST} identified and fewer than {2 * FEWEST} searches so far"
    return "ok", "as expected"


def _state(z: float) -> DriftState:
    return "drifted" if z >= DRIFT_Z else "watch" if z >= WATCH_Z else "ok"

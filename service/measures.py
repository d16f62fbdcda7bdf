"""What this process did since it began: counts and durations, of the service, of nobody in particular. What is told of
them is service.telemetry's; where traces are collected (service.tracing), each stage is a span, too.

Labels have few values (stages, outcomes, routes, networks), so that memory does not grow with what is asked.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final, Literal, Protocol

from service.security.acting import acting

Stage = Literal["read", "fetch", "decode", "detect", "align", "judge", "embed", "follow", "search", "check", "write"]
"""In the order of a request (docs/observability.md)."""
Lane = Literal["requests", "background"]

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
FACES: Final = (0, 1, 2, 3, 5, 10, 20, 50, 100)
SHARES: Final = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
QUALITIES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SIMILARITIES: Final = tuple(step / 20 for step in range(21))
"""Upper bounds of the histograms."""
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
"""Others are counted as one."""


class RequestSpan(Protocol):
    """``trace_id``: 32 hexadecimal digits."""

    trace_id: str

    def answered(self, name: str, route: str, status: int, code: str | None, request_id: str) -> None:
        """How it ended: ``code`` of the error, if it was one."""


class Spans(Protocol):
    """What makes spans of a trace (service.tracing). Safe to share between threads."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """A span within that of the request that this is done for; nothing where there is none."""

    def request(self, method: str, traceparent: str | None) -> AbstractContextManager[RequestSpan]:
        """The span of a request, within which all that is done for it is."""

    def here(self) -> object | None:
        """The span within which this is called, where it is collected."""

    def batch(self, network: str, items: int, askers: Mapping[object, float], ran_s: float) -> None:
        """A batch that has ended just now, for whoever waited for it and how long (s)."""


class Histogram:
    """Counts of values at most each of ``bounds``, and above the last. Safe to share between threads."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._lock = threading.Lock()

    def add(self, value: float) -> None:
        place = bisect_left(self.bounds, value)
        with self._lock:
            self.counts[place] += 1
            self.sum += value

    def now(self) -> tuple[list[int], float]:
        """Counts, and their values' sum, of one moment."""
        with self._lock:
            return list(self.counts), self.sum


class Histograms:
    """One for each combination of the labels' values that came."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._by: dict[tuple[str, ...], Histogram] = {}

    def of(self, *labels: str) -> Histogram:
        return self._by.get(labels) or self._by.setdefault(labels, Histogram(self._bounds))

    def items(self) -> list[tuple[tuple[str, ...], Histogram]]:
        return sorted(self._by.copy().items())


class Counts:
    """By label. ``known``: values that are told of before they came. Safe to share between threads."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._by = dict.fromkeys(known, 0)
        self._lock = threading.Lock()

    def add(self, label: str, count: int = 1) -> None:
        with self._lock:
            self._by[label] = self._by.get(label, 0) + count

    def items(self) -> list[tuple[str, int]]:
        return sorted(self._by.copy().items())


class Measures:
    """One application's. ``codes``: of the errors there are; ``verified``: outcomes of a verification."""

    def __init__(self, codes: Iterable[str] = (), verified: Iterable[str] = (), spans: Spans | None = None) -> None:
        self.began = time.time()
        self.spans = spans
        """Set when the application starts, where traces are collected."""
        self.in_progress = 0
        """Requests; of the event loop alone."""
        self.requests = Histograms(SECONDS)
        self.problems = Counts(codes)
        self.stages = Histograms(SECONDS)
        self.faces = Histograms(FACES)
        self.qualities = Histograms(QUALITIES)
        self.similarities = Histograms(SIMILARITIES)
        self.verified = Counts(verified)
        self.enrolled = Counts(["enrolled"])
        self.probed = Counts(["near_misses", "exhausted"])

    def stage(self, name: Stage) -> _Timed:
        """A block of a request, or of background work; it counts however it ends."""
        return _Timed(self.stages.of(name, lane()), None if self.spans is None else self.spans.stage(name))

    def traced(self, method: str, traceparent: str | None) -> AbstractContextManager[RequestSpan | None]:
        """A block that answers a request."""
        return nullcontext() if self.spans is None else self.spans.request(method, traceparent)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """One that was answered; ``route``: its template."""
        known = method if method in METHODS else "other"
        self.requests.of(known, route, f"{status // 100}xx").add(seconds)

    def photo(self, qualities: Sequence[float]) -> None:
        """One that was looked at, by its faces' quality scores."""
        of = lane()
        self.faces.of(of).add(len(qualities))
        for quality in qualities:
            self.qualities.of(of).add(quality)


class _Timed:
    __slots__ = ("_begun", "_histogram", "_span")

    def __init__(self, histogram: Histogram, span: AbstractContextManager[object] | None) -> None:
        self._histogram = histogram
        self._span = span

    def __enter__(self) -> None:
        if self._span is not None:
            self._span.__enter__()
        self._begun = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._histogram.add(time.perf_counter() - self._begun)
        if self._span is not None:
            self._span.__exit__(kind, error, trace)


def lane() -> Lane:
    """Of what is done now: a request's, or that of the jobs and what else is done in the background."""
    return "background" if acting().request_id is None else "requests"

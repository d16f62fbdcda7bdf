"""Metrics of this process: counters and histograms, and the series that are built for one scrape.

The only module that imports prometheus_client. The help texts are the list in docs/observability.md. Label values
come from small sets (stages, outcomes, routes, networks), so that requests cannot make memory grow.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from service.core.actor import current_actor

Stage = Literal["read", "fetch", "decode", "detect", "align", "judge", "embed", "follow", "search", "check", "write"]
"""Stages in the order of a request (docs/observability.md)."""
Lane = Literal["requests", "background"]
RECEIVERS: Final = ("stream", "webhook", "mqtt")
"""Labels of counters of events. No attempt of a stream fails."""

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
"""HTTP methods with a label of their own; all others are counted as ``other``."""

# Upper bounds of the histogram buckets.
BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64)
FACE_BUCKETS: Final = (0, 1, 2, 3, 5, 10, 20, 50, 100)
FILL_BUCKETS: Final = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
QUALITY_BUCKETS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SIMILARITY_BUCKETS: Final = tuple(step / 20 for step in range(21))

disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` series would double the counters


class Metrics:
    """Metrics of one application, in a registry of its own. Safe to share between threads.

    Args:
        codes: all error codes, exported from the start with the value 0.
        verify_outcomes: all outcomes of a verification, also exported from the start.
    """

    def __init__(self, codes: Iterable[str] = (), verify_outcomes: Iterable[str] = ()) -> None:
        self.started_at_s = time.time()
        self.in_progress = 0
        """Requests in progress. Changed on the event loop only."""
        self.open_streams = 0
        """Open event streams. Changed on the event loop only."""
        self.mqtt_connected: dict[str, bool] = {}
        """Whether this process is connected to the MQTT broker, by its host; empty if none is set."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._histogram(
            "kith_request_seconds",
            "Duration of requests, from the head to the end of the answer.",
            BUCKETS_S,
            "method",
            "route",
            "status",
        )
        self._stages = self._histogram("kith_stage_seconds", "Stages, failed ones too.", BUCKETS_S, "stage", "lane")
        self._faces = self._histogram("kith_photo_faces", "Faces per photo.", FACE_BUCKETS, "lane")
        self._qualities = self._histogram("kith_face_quality", "Quality scores of faces.", QUALITY_BUCKETS, "lane")
        self.similarities = self._histogram(
            "kith_similarity",
            "Similarity of the best candidate of a search.",
            SIMILARITY_BUCKETS,
            "recognizer",
            "outcome",
        )
        self.problems = self._counter(
            "kith_problems", "Requests and connections rejected or failed, by error code.", "code", codes
        )
        self.verified = self._counter("kith_verify", "Verifications by outcome.", "outcome", verify_outcomes)
        self._enrolled = self._counter(
            "kith_enroll",
            "Photos and embeddings enrolled, or rejected with an error code.",
            "outcome",
            ["enrolled"],
        )
        self.events = self._counter("kith_events_sent", "Events sent, or acknowledged.", "to", RECEIVERS)
        self.event_failures = self._counter(
            "kith_event_failures", "Failed attempts to send events, or to connect.", "to", RECEIVERS[1:]
        )
        self._batch_items = self._histogram("kith_batch_items", "Items per batch.", BATCH_BUCKETS, "network")
        self._batch_fill = self._histogram(
            "kith_batch_fill_ratio", "Items of a batch divided by its capacity.", FILL_BUCKETS, "network"
        )
        self._batch_s = self._histogram("kith_batch_seconds", "Duration of batches.", BUCKETS_S, "network")
        self._wait_s = self._histogram(
            "kith_queue_wait_seconds", "Time that items waited for a network.", BUCKETS_S, "network"
        )
        self._refused = Counter("kith_refused", "Items rejected by a full queue.", ["network"], registry=self.registry)
        self._dropped = Counter(
            "kith_dropped",
            "Items removed unprocessed: canceled, or failed.",
            ["network", "reason"],
            registry=self.registry,
        )

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Time a stage. Failed stages count too."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._stages.labels(name, lane()).observe(time.perf_counter() - started_s)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record an answered request; ``route``: the template of its path."""
        known = method if method in METHODS else "other"
        self._requests.labels(known, route, f"{status // 100}xx").observe(seconds)

    def observe_photo(self, qualities: Sequence[float]) -> None:
        """Record a photo by the quality scores (0 to 1) of its faces."""
        current = lane()
        self._faces.labels(current).observe(len(qualities))
        for quality in qualities:
            self._qualities.labels(current).observe(quality)

    def count_enrollment(self, outcome: str, count: int = 1) -> None:
        """Count photos or embeddings ``enrolled``, or rejected with an error code."""
        self._enrolled.labels(outcome).inc(count)

    def of_batches(self, network: str) -> BatchMetrics:
        return BatchMetrics(
            network,
            self._batch_items.labels(network),
            self._batch_fill.labels(network),
            self._batch_s.labels(network),
            self._wait_s.labels(network),
            self._refused.labels(network),
            self._dropped,
        )

    def text(self) -> bytes:
        """Return the Prometheus text format 0.0.4."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, about, labels, registry=self.registry, buckets=buckets)

    def _counter(self, name: str, about: str, label: str, known: Iterable[str]) -> Counter:
        counter = Counter(name, about, [label], registry=self.registry)
        for value in known:
            counter.labels(value)
        return counter


@dataclass
class BatchMetrics:
    """Metrics of one network's batcher, and their totals for GET /v1/status. ``dropped``: items by error code."""

    _network: str
    _items: Histogram
    _fill: Histogram
    _run_s: Histogram
    _wait_s: Histogram
    _refused: Counter
    _dropped: Counter
    batches: int = 0
    refused: int = 0
    dropped: Tally[str] = field(default_factory=Tally)

    def observe_batch(self, items: int, capacity: int, run_s: float, waits_s: Iterable[float]) -> None:
        """Record a finished batch; ``capacity``: the largest batch of the same cost."""
        self.batches += 1
        self._items.observe(items)
        self._fill.observe(items / capacity)
        self._run_s.observe(run_s)
        for wait_s in waits_s:
            self._wait_s.observe(wait_s)

    def count_refused(self, items: int) -> None:
        """Count items rejected by the full queue."""
        self.refused += items
        self._refused.inc(items)

    def count_dropped(self, reason: str, items: int) -> None:
        """Count items removed from the queue unprocessed."""
        self.dropped[reason] += items
        self._dropped.labels(self._network, reason).inc(items)


class ScrapeSeries:
    """Series built for one scrape, so that those of deleted galleries disappear with them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def gauge(self, name: str, about: str, values: float | Mapping[Any, float], *labels: str) -> None:
        """Add a gauge with one value, or one for each value of its label, or each tuple of values of its labels."""
        self._add(Gauge(name, about, labels, registry=self._registry), values)

    def counter(self, name: str, about: str, values: Mapping[Any, float], *labels: str) -> None:
        self._add(Counter(name, about, labels, registry=self._registry), values)

    def _add(self, series: Gauge | Counter, values: float | Mapping[Any, float]) -> None:
        for of, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            labels = (of,) if isinstance(of, str) else of
            (series.labels(*labels) if labels else series).inc(value)

    def text(self) -> bytes:
        """Return the Prometheus text format 0.0.4."""
        return generate_latest(self._registry)


def lane() -> Lane:
    """Return ``requests`` inside a request, ``background`` in jobs and other background work."""
    return "background" if current_actor().request_id is None else "requests"

"""What the service tells Prometheus. Series are made at each scrape from what is watched, so that a deleted gallery's
are gone with it: there are as many as galleries that were searched, times a dozen, and some dozens a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.batching import Batcher
from service.decision import IdentifyOutcome
from service.drift import STATES, Watches

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Telemetry:
    """A registry of its own, never the library's global one: two applications in a process tell of themselves alone."""

    def __init__(self, watches: Watches, batchers: Sequence[Batcher[Any, Any]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Decisions(watches))
        self._registry.register(_Batches(batchers))

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)


class _Decisions(Collector):
    def __init__(self, watches: Watches) -> None:
        self._watches = watches

    def collect(self) -> Iterator[Metric]:
        counts = CounterMetricFamily("kith_identify", "Decisions since the start.", labels=["gallery", "outcome"])
        mated = _gauge("kith_mated_similarity_mean", "Of those identified, in the latest decisions.")
        expected = _gauge("kith_mated_similarity_expected", "What the calibration expects of them.")
        unknown = _gauge("kith_unknown_rate", "Share of the latest searches that found nobody.")
        before = _gauge("kith_unknown_rate_before", "The same in as many searches before them.")
        states = _gauge("kith_drift_state", "1 for the state that a gallery is in.", "state")
        for gallery, drift in self._watches.drifts().items():
            for outcome in get_args(IdentifyOutcome):
                counts.add_metric([gallery, outcome], drift.since_start.get(outcome, 0))
            for comparison, observed, reference in ((drift.mated, mated, expected), (drift.unknown, unknown, before)):
                if comparison is not None:
                    observed.add_metric([gallery], comparison.observed)
                    reference.add_metric([gallery], comparison.expected)
            for state in STATES:
                states.add_metric([gallery, state], float(state == drift.state))
        yield from (counts, mated, expected, unknown, before, states)


class _Batches(Collector):
    def __init__(self, batchers: Sequence[Batcher[Any, Any]]) -> None:
        self._batchers = batchers

    def collect(self) -> Iterator[Metric]:
        queue = GaugeMetricFamily("kith_queue_items", "Items that wait for a network.", labels=["network", "lane"])
        sizes = _histogram("kith_batch_items", "Items that left together.")
        waits = _histogram("kith_queue_wait_seconds", "How long items waited for a network.")
        runs = _histogram("kith_batch_seconds", "How long batches took.")
        refused = CounterMetricFamily("kith_refused", "Items that were not let in.", labels=["network"])
        dropped = CounterMetricFamily("kith_dropped", "Items that left undone.", labels=["network", "reason"])
        for batcher in self._batchers:
            name, tally = batcher.name, batcher.tally
            queue.add_metric([name, "requests"], batcher.turns.urgent)
            queue.add_metric([name, "background"], batcher.turns.behind)
            for family, histogram in ((sizes, tally.batch_items), (waits, tally.wait_s), (runs, tally.run_s)):
                bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
                counts = accumulate(histogram.counts)
                family.add_metric([name], list(zip(bounds, counts, strict=True)), histogram.sum)
            refused.add_metric([name], tally.refused)
            for reason, count in sorted(tally.dropped.items()):
                dropped.add_metric([name, reason], count)
        yield from (queue, sizes, waits, runs, refused, dropped)


def _histogram(name: str, about: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, about, labels=["network"])


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=["gallery", *labels])

"""What the service tells Prometheus. Series are made at each scrape from what is watched, so that a deleted gallery's
are gone with it: there are as many as galleries that were searched, times a dozen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.decision import IdentifyOutcome
from service.drift import STATES, Watches

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Telemetry:
    """A registry of its own, never the library's global one: two applications in a process tell of themselves alone."""

    def __init__(self, watches: Watches) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Decisions(watches))

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


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=["gallery", *labels])

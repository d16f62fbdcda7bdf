"""What the service tells Prometheus: the only place that knows its names, and what prometheus_client is
(docs/observability.md has each metric; a test compares).

Series are made at each scrape from what is watched, so that a deleted gallery's are gone with it. Labels have few
values; galleries are many, and those beyond the first hundred (KITH_METRICS_GALLERIES) are told of together. Nothing is
told of anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from models.network import Network
from service.batching import Batcher
from service.decision import IdentifyOutcome
from service.drift import DRIFT_DIGITS, STATES, Drift, Watches
from service.measures import Histogram, Histograms, Measures
from service.samples import Samples

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OTHERS: Final = "(others)"
"""Stands for the galleries beyond the first; no gallery has such a name."""


@dataclass(frozen=True)
class About:
    """What runs: Kith's version, the pack's name, and the networks by what they are for."""

    version: str
    pack: str
    networks: Mapping[str, Network]


class Telemetry:
    """A registry of its own, never the library's global one: two applications in a process tell of themselves alone."""

    def __init__(
        self,
        about: About,
        measures: Measures,
        watches: Watches,
        batchers: Sequence[Batcher[Any, Any]],
        audit_backlog: Callable[[], tuple[int, int]],
        samples: Samples,
        most_galleries: int,
    ) -> None:
        self._registry = CollectorRegistry()
        for collector in (
            _Build(about, measures),
            _Requests(measures),
            _Faces(measures),
            _Batches(batchers),
            _Decisions(watches, measures, most_galleries),
            _Audit(audit_backlog),
            _Sampled(samples, most_galleries),
        ):
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4. Blocks for about a second at most."""
        return generate_latest(self._registry)


class _Build(Collector):
    def __init__(self, about: About, measures: Measures) -> None:
        self._about = about
        self._began = measures.began

    def collect(self) -> Iterator[Metric]:
        about = self._about
        yield InfoMetricFamily("kith_build", "What runs.", {"version": about.version, "pack": about.pack})
        networks = GaugeMetricFamily(
            "kith_network_info", "1 for how a network runs.", labels=["network", "engine", "precision", "provider"]
        )
        for name, network in about.networks.items():
            networks.add_metric([name, network.engine, network.precision, network.providers[0]], 1)
        yield networks
        yield GaugeMetricFamily("kith_start_time_seconds", "When the service began, since 1970.", self._began)


class _Requests(Collector):
    def __init__(self, measures: Measures) -> None:
        self._measures = measures

    def collect(self) -> Iterator[Metric]:
        measures = self._measures
        yield _histograms(
            "kith_request_seconds", "From the head to the answer's end.", measures.requests, "method", "route", "status"
        )
        yield GaugeMetricFamily("kith_requests_in_progress", "Requests under way.", measures.in_progress)
        yield _counts(
            "kith_problems",
            "Requests and connections that were refused or failed, by the error's code.",
            measures.problems.items(),
            "code",
        )
        yield _histograms("kith_stage_seconds", "How long stages took.", measures.stages, "stage", "lane")


class _Faces(Collector):
    def __init__(self, measures: Measures) -> None:
        self._measures = measures

    def collect(self) -> Iterator[Metric]:
        measures = self._measures
        yield _histograms("kith_photo_faces", "Faces of a photo.", measures.faces, "lane")
        yield _histograms("kith_face_quality", "Quality scores of faces.", measures.qualities, "lane")
        yield _counts("kith_verify", "Verifications by outcome.", measures.verified.items(), "outcome")
        yield _counts(
            "kith_enrol",
            "Photos and embeddings enrolled, or refused by the error's code.",
            measures.enrolled.items(),
            "outcome",
        )
        yield _counts(
            "kith_probed",
            "Audit lines about callers whose embeddings look like probes for a template, by reason.",
            measures.probed.items(),
            "reason",
        )


class _Batches(Collector):
    def __init__(self, batchers: Sequence[Batcher[Any, Any]]) -> None:
        self._batchers = batchers

    def collect(self) -> Iterator[Metric]:
        queue = GaugeMetricFamily("kith_queue_items", "Items that wait for a network.", labels=["network", "lane"])
        sizes = _histogram("kith_batch_items", "Items that left together.", "network")
        fills = _histogram("kith_batch_fill_ratio", "Items of a batch by those that it had room for.", "network")
        waits = _histogram("kith_queue_wait_seconds", "How long items waited for a network.", "network")
        runs = _histogram("kith_batch_seconds", "How long batches took.", "network")
        refused = CounterMetricFamily("kith_refused", "Items that were not let in.", labels=["network"])
        dropped = CounterMetricFamily("kith_dropped", "Items that left undone.", labels=["network", "reason"])
        for batcher in self._batchers:
            name, tally = batcher.name, batcher.tally
            queue.add_metric([name, "requests"], batcher.turns.urgent)
            queue.add_metric([name, "background"], batcher.turns.behind)
            _add(sizes, [name], tally.batch_items)
            _add(fills, [name], tally.fill)
            _add(waits, [name], tally.wait_s)
            _add(runs, [name], tally.run_s)
            refused.add_metric([name], tally.refused)
            for reason, count in sorted(tally.dropped.copy().items()):
                dropped.add_metric([name, reason], count)
        yield from (queue, sizes, fills, waits, runs, refused, dropped)


class _Decisions(Collector):
    def __init__(self, watches: Watches, measures: Measures, most_galleries: int) -> None:
        self._watches = watches
        self._similarities = measures.similarities
        self._most = most_galleries

    def collect(self) -> Iterator[Metric]:
        counts = CounterMetricFamily("kith_identify", "Decisions since the start.", labels=["gallery", "outcome"])
        mated = _gauge("kith_mated_similarity_mean", "Of those identified, in the latest decisions.")
        expected = _gauge("kith_mated_similarity_expected", "What the calibration expects of them.")
        unknown = _gauge("kith_unknown_rate", "Share of the latest searches that found nobody.")
        before = _gauge("kith_unknown_rate_before", "The same in as many searches before them.")
        states = _gauge("kith_drift_state", "1 for the state that a gallery is in.", "state")
        drifts = list(self._watches.drifts().items())
        for gallery, drift in drifts[: self._most]:
            _add_outcomes(counts, gallery, drift.since_start)
            for comparison, observed, reference in ((drift.mated, mated, expected), (drift.unknown, unknown, before)):
                if comparison is not None:
                    observed.add_metric([gallery], round(comparison.observed, DRIFT_DIGITS))
                    reference.add_metric([gallery], comparison.expected)
            for state in STATES:
                states.add_metric([gallery, state], float(state == drift.state))
        if others := drifts[self._most :]:
            _add_outcomes(counts, OTHERS, _together(drift for _, drift in others))
        yield from (counts, mated, expected, unknown, before, states)
        yield _histograms(
            "kith_similarity", "Of a search's best candidate.", self._similarities, "recogniser", "outcome"
        )


class _Audit(Collector):
    def __init__(self, backlog: Callable[[], tuple[int, int]]) -> None:
        self._backlog = backlog

    def collect(self) -> Iterator[Metric]:
        waiting, lost = self._backlog()
        yield GaugeMetricFamily("kith_audit_waiting", "Lines of the audit that are yet to be written.", waiting)
        yield GaugeMetricFamily("kith_audit_lost", "Lines that are lost, of which the audit does not tell yet.", lost)


class _Sampled(Collector):
    """What lies elsewhere, as of some seconds ago (service.samples)."""

    def __init__(self, samples: Samples, most_galleries: int) -> None:
        self._samples = samples
        self._most = most_galleries

    def collect(self) -> Iterator[Metric]:
        sample = self._samples.latest()
        age = float("inf") if sample is None else sample.age_s
        yield GaugeMetricFamily("kith_sample_age_seconds", "Since readiness and the database were looked at.", age)
        yield GaugeMetricFamily(
            "kith_ready", "1 where all that is needed works.", float(sample is not None and sample.ready)
        )
        if sample is None or sample.stale:
            return
        checks = GaugeMetricFamily("kith_check_ok", "1 where a check of readiness succeeds.", labels=["check"])
        for name, error in sample.checks.items():
            checks.add_metric([name], float(error is None))
        yield checks
        if sample.disk is not None:
            free, size = sample.disk
            yield GaugeMetricFamily("kith_disk_free_bytes", "Of the data directory's file system.", free)
            yield GaugeMetricFamily("kith_disk_size_bytes", "Of the data directory's file system.", size)
        if sample.jobs is not None:
            jobs = GaugeMetricFamily("kith_jobs", "Jobs of the last days, of all processes.", labels=["state"])
            for state, count in sample.jobs.items():
                jobs.add_metric([state], count)
            yield jobs
        yield GaugeMetricFamily(
            "kith_retention_paused",
            "1 while nothing is deleted for its age, as the clock cannot be relied on.",
            float(sample.paused is not None),
        )
        if sample.held is not None:
            held = _gauge("kith_retention_held", "1 for a gallery whose retention waits for a confirmation.")
            names = list(sample.held)
            for gallery in names[: self._most]:
                held.add_metric([gallery], 1)
            if others := len(names[self._most :]):
                held.add_metric([OTHERS], others)
            yield held
        if sample.sizes is not None:
            sizes = sample.sizes
            yield GaugeMetricFamily("kith_galleries", "Galleries.", sizes.galleries)
            yield GaugeMetricFamily("kith_subjects", "Subjects of all galleries.", sizes.subjects)
            yield GaugeMetricFamily("kith_templates", "Templates of all galleries.", sizes.templates)
            subjects, templates = (
                _gauge("kith_gallery_subjects", "Subjects."),
                _gauge("kith_gallery_templates", "Templates."),
            )
            for gallery, (people, photos) in sizes.by_gallery.items():
                subjects.add_metric([gallery], people)
                templates.add_metric([gallery], photos)
            yield from (subjects, templates)
        if sample.lags is not None:
            lines = _gauge(
                "kith_index_lag_lines", "Changes that an index here has yet to apply: before its next search."
            )
            seconds = _gauge("kith_index_lag_seconds", "For how long there have been some.")
            for gallery, lag in sample.lags.items():
                lines.add_metric([gallery], lag.lines)
                seconds.add_metric([gallery], lag.seconds)
            yield from (lines, seconds)


def _together(drifts: Iterable[Drift]) -> Counter[IdentifyOutcome]:
    counts: Counter[IdentifyOutcome] = Counter()
    for drift in drifts:
        counts.update(drift.since_start)
    return counts


def _add_outcomes(family: CounterMetricFamily, gallery: str, counts: Mapping[IdentifyOutcome, int]) -> None:
    for outcome in get_args(IdentifyOutcome):
        family.add_metric([gallery, outcome], counts.get(outcome, 0))


def _counts(name: str, about: str, counts: Iterable[tuple[str, int]], label: str) -> CounterMetricFamily:
    family = CounterMetricFamily(name, about, labels=[label])
    for value, count in counts:
        family.add_metric([value], count)
    return family


def _histograms(name: str, about: str, histograms: Histograms, *labels: str) -> HistogramMetricFamily:
    family = _histogram(name, about, *labels)
    for values, histogram in histograms.items():
        _add(family, values, histogram)
    return family


def _add(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    counts, total = histogram.now()
    family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total)


def _histogram(name: str, about: str, *labels: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, about, labels=labels)


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=["gallery", *labels])

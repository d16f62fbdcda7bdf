"""Text of GET /metrics: the counters of this process, and gauges of its current state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, get_args

from kith.wire.common import IdentifyOutcome
from kith.wire.galleries import DriftOut
from models.runtime.network import Network
from service.inference.batcher import Batcher
from service.observability.metrics import Metrics, ScrapeSeries
from service.operations.status import MAX_GALLERIES, RecentState, ServiceState
from service.risk.drift import STATES, Watches

OTHERS: Final = "(others)"
"""Label for all galleries above the limit together; no gallery can have this name."""


@dataclass(frozen=True)
class MetricsExport:
    """Exporter for Prometheus. Galleries above MAX_GALLERIES share the label OTHERS."""

    model_id: str
    networks: Mapping[Batcher[Any, Any], Network]
    metrics: Metrics
    watches: Watches
    audit_backlog: Callable[[], tuple[int, int]]
    recent_state: RecentState

    def text(self) -> bytes:
        """Return the Prometheus text format 0.0.4. Blocks for about a second at most."""
        series = ScrapeSeries()
        self._add_process(series)
        sample = self.recent_state.latest()  # first, as it drops the watches of deleted galleries
        self._add_drift(series, list(self.watches.drifts().items()))
        self._add_sample(series, sample)
        return self.metrics.text() + series.text()

    def _add_process(self, series: ScrapeSeries) -> None:
        gauge, metrics, networks = series.gauge, self.metrics, self.networks
        gauge("kith_build_info", "Running version.", {(version("kith-face"), self.model_id): 1}, "version", "pack")
        engines = {(b.name, n.engine, n.precision, n.providers[0]): 1 for b, n in networks.items()}
        about = "1 for the engine of each network."
        gauge("kith_network_info", about, engines, "network", "engine", "precision", "provider")
        gauge("kith_start_time_seconds", "Start of the service, seconds since 1970.", metrics.started_at_s)
        gauge("kith_requests_in_progress", "Requests in progress, this one included.", metrics.in_progress)
        gauge("kith_event_streams", "Open event streams.", metrics.open_streams)
        about = "1 while this process sends events to the MQTT broker. One of all servers does: use max."
        gauge("kith_mqtt_connected", about, dict(metrics.mqtt_connected), "broker")
        queued = {(b.name, "requests"): b.queue.count(background=False) for b in networks}
        queued |= {(b.name, "background"): b.queue.count(background=True) for b in networks}
        gauge("kith_queue_items", "Items waiting for a network.", queued, "network", "lane")
        waiting, lost = self.audit_backlog()
        gauge("kith_audit_waiting", "Audit entries not written yet.", waiting)
        gauge("kith_audit_lost", "Audit entries lost and not yet reported in the audit.", lost)

    def _add_drift(self, series: ScrapeSeries, drifts: list[tuple[str, DriftOut]]) -> None:
        decided = Counter[tuple[str, str]]()
        for number, (name, drift) in enumerate(drifts):
            for outcome in get_args(IdentifyOutcome):
                of = (name if number < MAX_GALLERIES else OTHERS, outcome)
                decided[of] += drift.since_start_counts.get(outcome, 0)
        series.counter("kith_identify", "Decisions since the start.", decided, "gallery", "outcome")
        named = drifts[:MAX_GALLERIES]
        mated = {name: drift.mated_similarity for name, drift in named if drift.mated_similarity is not None}
        about = "Mean similarity of identified faces in the latest decisions."
        series.gauge("kith_mated_similarity_mean", about, {k: one.observed for k, one in mated.items()}, "gallery")
        about = "Mean similarity that the calibration expects of identified faces."
        series.gauge("kith_mated_similarity_expected", about, {k: one.expected for k, one in mated.items()}, "gallery")
        states = {(name, state): state == drift.state for name, drift in named for state in STATES}
        series.gauge("kith_drift_state", "1 for the drift state.", states, "gallery", "state")

    def _add_sample(self, series: ScrapeSeries, sample: ServiceState) -> None:
        """Add readiness, disk and database figures. A stale sample exports its age only."""
        gauge = series.gauge
        gauge("kith_sample_age_seconds", "Age of the readiness and database figures.", sample.age_s)
        gauge("kith_ready", "1 while the service is ready.", sample.ready)
        if sample.stale:
            return
        checks = {check.name: check.ok for check in sample.checks}
        gauge("kith_check_ok", "1 while a readiness check succeeds.", checks, "check")
        if sample.clock is not None:
            gauge("kith_retention_paused", "1 while retention is paused because of the clock.", not sample.clock.ok)
        if sample.disk is not None:
            gauge("kith_disk_free_bytes", "Free bytes of the data directory's file system.", sample.disk.free_bytes)
            gauge("kith_disk_size_bytes", "Size of the data directory's file system.", sample.disk.size_bytes)
        if sample.job_counts is not None:
            gauge("kith_jobs", "Jobs of all processes, by state.", sample.job_counts, "state")
        if (sizes := sample.sizes) is not None:
            gauge("kith_galleries", "Galleries.", sizes.galleries)
            gauge("kith_subjects", "Subjects of all galleries.", sizes.subjects)
            gauge("kith_templates", "Templates of all galleries.", sizes.templates)
            subjects = {name: count for name, (count, _) in sizes.by_gallery.items()}
            templates = {name: count for name, (_, count) in sizes.by_gallery.items()}
            gauge("kith_gallery_subjects", "Subjects of a gallery.", subjects, "gallery")
            gauge("kith_gallery_templates", "Templates of a gallery.", templates, "gallery")
        if (lags := sample.index_lag) is not None:
            about = "Committed changes that an index of this process has not applied yet, at most 10000."
            gauge("kith_index_lag_lines", about, {name: lag.line_count for name, lag in lags.items()}, "gallery")
            about = "Time since an index was last current."
            gauge("kith_index_lag_seconds", about, {name: lag.seconds for name, lag in lags.items()}, "gallery")

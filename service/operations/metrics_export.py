"""Text of GET /metrics: the counters of this process, and gauges of its current state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from kith.wire.common import IdentifyOutcome
from kith.wire.galleries import DriftOut
from models.runtime.network import Network
from service.inference.batcher import Batcher
from service.observability.metrics import Metrics, ScrapeSeries
from service.operations.status import RecentState, ServiceState
from service.risk.drift import STATES, Watches

OTHERS: Final = "(others)"
"""Label for all galleries above the limit together; no gallery can have this name."""


@dataclass(frozen=True)
class MetricsExport:
    """Exporter for Prometheus. Galleries above ``max_galleries`` share the label OTHERS."""

    version: str
    model_id: str
    networks: Mapping[Batcher[Any, Any], Network]
    metrics: Metrics
    watches: Watches
    audit_backlog: Callable[[], tuple[int, int]]
    recent_state: RecentState
    max_galleries: int

    def text(self) -> bytes:
        """Return the Prometheus text format 0.0.4. Blocks for about a second at most."""
        series = ScrapeSeries()
        self._add_process(series)
        self._add_drift(series, list(self.watches.drifts().items()))
        self._add_sample(series, self.recent_state.latest())
        return self.metrics.text() + series.text()

    def _add_process(self, series: ScrapeSeries) -> None:
        series.info("kith_build", "Running version.", {"version": self.version, "pack": self.model_id})
        series.table(
            "kith_network_info",
            "1 for the engine of each network.",
            ["network", "engine", "precision", "provider"],
            [((b.name, n.engine, n.precision, n.providers[0]), 1) for b, n in self.networks.items()],
        )
        series.gauge("kith_start_time_seconds", "Start of the service, seconds since 1970.", self.metrics.started_at_s)
        series.gauge("kith_requests_in_progress", "Requests in progress.", self.metrics.in_progress)
        series.gauge("kith_event_streams", "Open event streams.", self.metrics.open_streams)
        about = "1 while this process sends events to the MQTT broker."
        series.gauges("kith_mqtt_connected", about, "broker", dict(self.metrics.mqtt_connected))
        queued = [((b.name, "requests"), b.queue.foreground_count) for b in self.networks]
        queued += [((b.name, "background"), b.queue.background_count) for b in self.networks]
        series.table("kith_queue_items", "Items waiting for a network.", ["network", "lane"], queued)
        waiting, lost = self.audit_backlog()
        series.gauge("kith_audit_waiting", "Audit entries not written yet.", waiting)
        series.gauge("kith_audit_lost", "Audit entries lost and not yet reported in the audit.", lost)

    def _add_drift(self, series: ScrapeSeries, drifts: list[tuple[str, DriftOut]]) -> None:
        named, others = drifts[: self.max_galleries], drifts[self.max_galleries :]
        series.counters(
            "kith_identify",
            "Decisions since the start.",
            ["gallery", "outcome"],
            [*_outcomes(named), *_outcomes([(OTHERS, drift) for _, drift in others])],
        )
        mated = {name: drift.mated_similarity for name, drift in named if drift.mated_similarity is not None}
        series.gauges(
            "kith_mated_similarity_mean",
            "Mean similarity of identified faces in the latest decisions.",
            "gallery",
            {name: one.observed for name, one in mated.items()},
        )
        series.gauges(
            "kith_mated_similarity_expected",
            "Mean similarity that the calibration expects of identified faces.",
            "gallery",
            {name: one.expected for name, one in mated.items()},
        )
        series.table(
            "kith_drift_state",
            "1 for the drift state of a gallery.",
            ["gallery", "state"],
            [((name, state), state == drift.state) for name, drift in named for state in STATES],
        )

    def _add_sample(self, series: ScrapeSeries, sample: ServiceState) -> None:
        """Add readiness, disk and database figures. A stale sample exports its age only."""
        series.gauge("kith_sample_age_seconds", "Age of the readiness and database figures.", sample.age_s)
        series.gauge("kith_ready", "1 while the service is ready.", sample.ready)
        if sample.stale:
            return
        checks = {check.name: check.ok for check in sample.checks}
        series.gauges("kith_check_ok", "1 while a readiness check succeeds.", "check", checks)
        if sample.clock is not None:
            about = "1 while retention is paused because of the clock."
            series.gauge("kith_retention_paused", about, not sample.clock.ok)
        if sample.disk is not None:
            about = "Free bytes of the data directory's file system."
            series.gauge("kith_disk_free_bytes", about, sample.disk.free_bytes)
            series.gauge("kith_disk_size_bytes", "Size of the data directory's file system.", sample.disk.size_bytes)
        if sample.job_counts is not None:
            series.gauges("kith_jobs", "Jobs of all processes, by state.", "state", sample.job_counts)
        if (sizes := sample.sizes) is not None:
            series.gauge("kith_galleries", "Galleries.", sizes.galleries)
            series.gauge("kith_subjects", "Subjects of all galleries.", sizes.subjects)
            series.gauge("kith_templates", "Templates of all galleries.", sizes.templates)
            subjects = {name: count for name, (count, _) in sizes.by_gallery.items()}
            templates = {name: count for name, (_, count) in sizes.by_gallery.items()}
            series.gauges("kith_gallery_subjects", "Subjects of a gallery.", "gallery", subjects)
            series.gauges("kith_gallery_templates", "Templates of a gallery.", "gallery", templates)
        if sample.index_lag is not None:
            lines = {name: lag.line_count for name, lag in sample.index_lag.items()}
            seconds = {name: lag.seconds for name, lag in sample.index_lag.items()}
            about = "Committed changes that an index of this process has not applied yet."
            series.gauges("kith_index_lag_lines", about, "gallery", lines)
            series.gauges("kith_index_lag_seconds", "Time since an index was last current.", "gallery", seconds)


def _outcomes(drifts: Sequence[tuple[str, DriftOut]]) -> Iterator[tuple[tuple[str, str], float]]:
    for name, drift in drifts:
        for outcome in get_args(IdentifyOutcome):
            yield (name, outcome), drift.since_start_counts.get(outcome, 0)

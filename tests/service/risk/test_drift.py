"""Drift is reported when it exists, rarely otherwise, and never names a subject."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from kith.wire.common import IdentifyOutcome
from models.risk.calibration import Calibration
from service.domain.events import EventFilter, Position
from service.domain.gallery import GallerySettings
from service.observability.metrics import Metrics
from service.operations.metrics_export import MetricsExport
from service.operations.status import RecentState, ServiceState
from service.risk.drift import MIN_IDENTIFIED, WINDOW, Decided, DriftReports, Watch, Watches
from service.storage.events.log import EventLog
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import open_database

THRESHOLD = 0.4
HISTORIES = 1000


def decided(
    rng: np.random.Generator, count: int, strangers: float = 0.3, shift: float = 0.0, in_a_row: int = 1
) -> list[Decided]:
    """Searches of the calibration fixture's people, N(0.6, 0.15), some lost below the threshold; ``in_a_row`` of the
    same person, whose scores then hardly differ."""
    groups = -(-count // in_a_row)
    stranger = np.repeat(rng.random(groups) < strangers, in_a_row)[:count]
    scores = np.repeat(rng.normal(0.6 + shift, 0.15, groups), in_a_row)[:count]
    if in_a_row > 1:
        scores = scores + rng.normal(0, 0.01, count)
    outcomes: list[IdentifyOutcome] = [
        "unknown" if nobody or score < THRESHOLD else "identified"
        for nobody, score in zip(stranger, scores, strict=True)
    ]
    return [
        Decided(outcome, float(np.clip(score, -1, 1)), THRESHOLD)
        for outcome, score in zip(outcomes, scores, strict=True)
    ]


def test_the_expected_similarity_is_that_of_a_truncated_normal(calibration: Calibration) -> None:
    rng = np.random.default_rng(4)
    scores = rng.normal(0.6, 0.15, 1_000_000)
    scores = scores[scores <= 1]
    for t in (-1.0, 0.4, 0.7):
        found = calibration.genuine_at_or_above(t)
        assert found is not None
        assert found.mean == pytest.approx(scores[scores >= t].mean(), abs=0.005)
        assert found.deviation == pytest.approx(scores[scores >= t].std(), abs=0.005)
    # The fixture's few scores above 1 count as 1; no pair supports a higher score.
    assert calibration.genuine_at_or_above(1.01) is None


@pytest.mark.parametrize(("length", "in_a_row"), [(250, 1), (2 * WINDOW, 1), (2 * WINDOW, 5)])
def test_unchanged_scores_are_rarely_called_drifted(calibration: Calibration, length: int, in_a_row: int) -> None:
    rng = np.random.default_rng(7)
    states = []
    for _ in range(HISTORIES if length < WINDOW else HISTORIES // 4):
        watch = Watch(calibration)
        watch.add(decided(rng, length, in_a_row=in_a_row))
        states.append(watch.drift().state)
    # Documented false alarm rates: below 1 in 1000 and 1 in 100. Chance rarely exceeds these quantiles.
    for rate, alarms in ((0.001, states.count("drifted")), (0.01, len(states) - states.count("ok"))):
        assert alarms <= stats.binom.ppf(0.999, len(states), rate)
    assert "too_few" not in states


def test_lower_similarities_are_a_drift_and_higher_ones_are_not(calibration: Calibration) -> None:
    rng = np.random.default_rng(8)
    watch = Watch(calibration)
    watch.add(decided(rng, 3 * WINDOW))
    assert watch.drift().state == "ok"
    watch.add(decided(rng, WINDOW, shift=-0.1))
    lower = watch.drift()
    assert lower.state == "drifted"
    assert lower.mated_similarity is not None
    assert lower.mated_similarity.observed < lower.mated_similarity.expected - 0.03
    usual = calibration.genuine_at_or_above(THRESHOLD)
    assert usual is not None and lower.mated_similarity.expected == pytest.approx(usual.mean)
    assert "calibrate" in lower.detail
    higher = Watch(calibration)
    higher.add(decided(rng, 2 * WINDOW, shift=0.1))
    found = higher.drift()
    assert found.mated_similarity is not None
    assert found.mated_similarity.z > 4
    assert found.state == "ok"


def test_few_searches_and_a_pack_without_calibration_give_no_verdict(calibration: Calibration) -> None:
    rng = np.random.default_rng(10)
    watch, uncalibrated = Watch(calibration), Watch(None)
    assert watch.drift().state == "too_few"
    watch.add([Decided("no_face"), Decided("rejected_quality"), *decided(rng, MIN_IDENTIFIED - 1)])
    assert watch.drift().state == "too_few"
    watch.add(decided(rng, 2 * MIN_IDENTIFIED))
    found = watch.drift()
    assert found.state != "too_few"
    assert found.window_counts["no_face"] == 1
    assert sum(found.since_start_counts.values()) == 3 * MIN_IDENTIFIED + 1
    uncalibrated.add(decided(rng, 2 * WINDOW))
    assert (uncalibrated.drift().state, uncalibrated.drift().mated_similarity) == ("too_few", None)


def test_memory_is_bounded_and_counts_are_not_lost_between_threads(calibration: Calibration) -> None:
    watch = Watch(calibration)
    some = decided(np.random.default_rng(12), 500)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(watch.add, [some] * 40))
    found = watch.drift()
    assert sum(found.since_start_counts.values()) == 20_000
    assert sum(found.window_counts.values()) == WINDOW


def test_a_deleted_gallery_takes_its_series_with_it(calibration: Calibration) -> None:
    watches = Watches({"f": calibration})
    samples = RecentState(ServiceState)
    telemetry = MetricsExport("pack", {}, Metrics(), watches, lambda: (0, 0), samples)
    watches.of(1, "staff", "f").add([Decided("no_face")])
    watches.of(2, "guests", "f").add([Decided("no_face")])
    assert b'kith_identify_total{gallery="staff",outcome="no_face"} 1.0' in telemetry.text()
    watches.drop([1])
    assert b"staff" not in telemetry.text()
    # "guests" was deleted and created again: one series, counted from zero.
    watches.of(3, "guests", "f").add([Decided("unknown", 0.1, 0.4)])
    lines = telemetry.text().decode().splitlines()
    assert 'kith_identify_total{gallery="guests",outcome="no_face"} 0.0' in lines
    assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)
    assert watches.of(3, "guests", "f") is not watches.of(3, "guests", "another recognizer")
    watches.of(4, "busy", "f").add([Decided("identified", 0.9, 0.4)] * MIN_IDENTIFIED)
    told = telemetry.text().decode().splitlines()
    assert 'kith_mated_similarity_mean{gallery="busy"} 0.9' in told
    assert {
        f'kith_drift_state{{gallery="busy",state="{one}"}} {value}' for one, value in (("ok", 1.0), ("drifted", 0.0))
    } < {*told}


def test_drift_is_reported_when_it_changes(tmp_path: Path, calibration: Calibration) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'kith.db'}")
    store, watches = Store(database), Watches({"f" * 32: calibration})
    gallery = store.galleries.create("g", "f" * 32, 8, GallerySettings())
    WebhookStore(database).create("https://receiver.example/", None, EventFilter())
    reports, watch = DriftReports(store, watches), watches.of(gallery.pk, "g", gallery.fingerprint)

    def told() -> list[str]:
        reports.look()
        stored = EventLog(database).read(Position(0, 0), EventFilter()).events
        return [event.document["data"]["state"] for event in stored]

    usual, lower = ([Decided("identified", similarity, 0.4)] * WINDOW for similarity in (0.7, 0.45))
    watch.add(usual)
    assert told() == []
    watch.add(lower)
    assert [told(), told()] == [["drifted"], ["drifted"]]
    watch.add(usual)
    assert [told(), told()] == [["drifted", "ok"]] * 2
    store.galleries.delete("g")
    watch.add(lower)
    assert told() == []
    store.close()

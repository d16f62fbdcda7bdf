"""Drift is reported once when it appears, and once when it ends."""

from __future__ import annotations

from pathlib import Path

from models.risk.calibration import Calibration
from service.domain.events import EventFilter, Position
from service.domain.gallery import GallerySettings
from service.risk.drift import WINDOW, Decided, DriftReports, Watches
from service.storage.events.log import EventLog
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import open_database


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

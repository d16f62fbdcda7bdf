"""The log of stored events: complete, in order, bounded, and kept only while it has readers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from service.core.errors import StorageError
from service.domain.events import Event, EventFilter
from service.domain.gallery import Gallery, GallerySettings
from service.storage.audit.log import record_entries
from service.storage.db.engine import Database
from service.storage.db.tables import deliveries, events, leases, webhooks
from service.storage.events import deliveries as module
from service.storage.events.deliveries import DeliveryStore
from service.storage.events.log import PAGE, EventLog, StoredEvent
from service.storage.events.outbox import publish
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore

EVERYTHING = EventFilter()


@pytest.fixture
def log(database: Database) -> EventLog:
    WebhookStore(database).claim("stream")
    return EventLog(database)


@pytest.fixture
def gallery(database: Database, log: EventLog) -> Gallery:
    return make_gallery(database, "g")


def make_gallery(database: Database, name: str) -> Gallery:
    store = Store(database)
    store.galleries.create(name, "f" * 32, 8, GallerySettings())
    return store.galleries.get(name)


def decision(number: int, outcome: str = "unknown") -> Event:
    return Event("decision", {"outcome": outcome, "number": number, "false_alarm_probability": number / 1000})


def report(database: Database, gallery: Gallery, *new: Event) -> None:
    record_entries(database, [], [(gallery, new)])


def read_all(log: EventLog, after: int = 0, chosen: EventFilter = EVERYTHING) -> list[int]:
    last, numbers = log.last(), list[int]()
    more: StoredEvent | None = StoredEvent(after, datetime.now(UTC), {})
    while more is not None:
        found, more = log.read(more.pk, last, chosen)
        numbers += [event.document["data"]["number"] for event in found]
    return numbers


def test_events_are_read_in_order_without_deliveries(database: Database, log: EventLog, gallery: Gallery) -> None:
    count = 2 * PAGE + 1
    report(database, gallery, *(decision(number) for number in range(count)))
    assert read_all(log) == list(range(count))
    (first, *_), _ = log.read(0, log.last(), EVERYTHING)
    assert read_all(log, first.pk) == list(range(1, count))
    assert first.document.keys() == {"id", "type", "timestamp", "data"}
    with database.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(deliveries)).scalar() == 0


def test_filters_of_streams_are_those_of_webhooks(database: Database, log: EventLog, gallery: Gallery) -> None:
    other = make_gallery(database, "other")
    report(database, gallery, decision(1, "identified"), decision(20, "unknown"), decision(3, "unknown"))
    report(database, other, decision(40))
    report(database, other, Event("drift", {"number": 5}))
    for chosen, numbers in (
        (EventFilter(galleries=frozenset({"other"})), [40, 5]),
        (EventFilter(galleries=frozenset()), []),
        (EventFilter(types=frozenset({"drift"})), [5]),
        (EventFilter(outcomes=frozenset({"identified"})), [1, 5]),
        (EventFilter(types=frozenset({"decision"}), min_risk=0.02), [20, 40]),
    ):
        assert read_all(log, chosen=chosen) == numbers


def test_an_event_that_commits_late_is_not_passed_over(database: Database, log: EventLog, gallery: Gallery) -> None:
    if database.file is not None:
        pytest.skip("SQLite has one writer at a time")
    other = make_gallery(database, "other")
    report(database, gallery, decision(0))
    began = log.last()
    with database.write(StorageError("conflict")) as connection:
        publish(database.vault, connection, gallery, [decision(1)])
        report(database, other, decision(2))  # takes a higher key, and commits earlier
        assert log.last() == began
        assert read_all(log, began) == []
    assert read_all(log, began) == [1, 2]


def test_a_bounded_number_stays_stored_for_a_bounded_time(
    database: Database, log: EventLog, gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    report(database, gallery, *(decision(number) for number in range(9)))
    DeliveryStore(database).sweep()
    assert read_all(log) == [6, 7, 8]
    with database.write(StorageError("conflict")) as connection:
        old = events.c.pk == sa.select(sa.func.max(events.c.pk)).scalar_subquery()
        connection.execute(events.update().where(old).values(at=datetime.now(UTC) - timedelta(days=8)))
    DeliveryStore(database).sweep()
    assert read_all(log) == [6, 7]
    assert log.last() > 0


def test_nothing_is_stored_after_nobody_read_for_a_week(database: Database, log: EventLog, gallery: Gallery) -> None:
    store = WebhookStore(database)
    store.claim("stream")  # again: it is extended
    report(database, gallery, decision(1))
    DeliveryStore(database).sweep()
    assert read_all(log) == [1]
    assert list(store.list_all()) == []
    with database.write(StorageError("conflict")) as connection:
        connection.execute(leases.update().values(until=datetime.now(UTC) - timedelta(seconds=1)))
    DeliveryStore(database).sweep()
    report(database, Store(database).galleries.get("g"), decision(2))
    assert read_all(log) == []
    with database.read() as connection:
        assert connection.execute(sa.select(webhooks)).all() == []
    store.claim("stream")
    report(database, gallery, decision(3))
    assert read_all(log) == [3]


def test_erased_subjects_leave_the_log(database: Database, log: EventLog, gallery: Gallery) -> None:
    report(database, gallery, Event("decision", {"outcome": "identified", "number": 1}, "nobody"))
    assert read_all(log) == []  # the subject does not exist any more

"""The log of stored events: complete, in order, bounded, and kept only while it has readers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from service.core.clock import Clock
from service.core.errors import StorageError
from service.domain.events import GIVE_UP_AFTER, Event, EventFilter, Position
from service.domain.gallery import Gallery, GallerySettings
from service.storage.audit.log import record_entries
from service.storage.db.engine import Database
from service.storage.db.tables import events, receivers
from service.storage.events.log import PAGE, EventLog
from service.storage.events.outbox import XID, Place, publish
from service.storage.repositories import receivers as module
from service.storage.repositories.receivers import ReceiverStore
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import ON_BOTH

pytestmark = ON_BOTH

EVERYTHING = EventFilter()
BEGIN = Position(0, 0)


@pytest.fixture
def log(database: Database) -> EventLog:
    ReceiverStore(database).claim("stream")
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


def read_all(log: EventLog, after: Position = BEGIN, chosen: EventFilter = EVERYTHING) -> list[int]:
    numbers, has_more = list[int](), True
    while has_more:
        found, after, has_more = log.read(after, chosen)
        numbers += [event.document["data"]["number"] for event in found]
    return numbers


def test_events_are_read_in_order(database: Database, log: EventLog, gallery: Gallery) -> None:
    count = 2 * PAGE + 1
    report(database, gallery, *(decision(number) for number in range(count)))
    assert read_all(log) == list(range(count))
    first = log.read(Position(0, 0), EVERYTHING).events[0]
    assert read_all(log, first.position) == list(range(1, count))
    assert first.document.keys() == {"type", "timestamp", "data"}


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
    began = log.end()
    with database.write(StorageError("conflict")) as connection:
        connection.execute(XID)  # as a first write does
        report(database, other, decision(2))  # of a later transaction, which commits earlier
        assert read_all(log, began) == []
        publish(database.vault, connection, gallery, [decision(1)])
    assert read_all(log, began) == [1, 2]


def keep(database: Database, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", most)


def age(database: Database, days: int) -> None:
    """Make all stored events older."""
    with database.write(StorageError("conflict")) as connection:
        connection.execute(events.update().values(at=datetime.now(UTC) - timedelta(days=days)))


def test_a_bounded_number_stays_stored_for_a_bounded_time(
    database: Database, log: EventLog, gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(database, 3, monkeypatch)
    store = ReceiverStore(database)
    report(database, gallery, *(decision(number) for number in range(9)))
    store.sweep(Clock())
    assert read_all(log) == [6, 7, 8]
    _, floor, _ = store.built_in("stream")
    assert len(log.read(floor.position, EVERYTHING).events) == 3  # streams behind it are told that they missed events
    age(database, 8)
    store.sweep(Clock())
    assert read_all(log) == []
    assert store.built_in("stream")[1].position > floor.position


def test_events_that_a_receiver_waits_for_outlive_a_clock_that_is_ahead(
    database: Database, log: EventLog, gallery: Gallery
) -> None:
    store, webhooks = ReceiverStore(database), WebhookStore(database)
    made = webhooks.create("https://receiver.example/", None, EventFilter())
    report(database, gallery, *(decision(number) for number in range(65)))
    age(database, 8)  # as a clock sees them that is eight days ahead
    store.sweep(Clock())
    assert len(log.read(Position(0, 0), EVERYTHING).events) == 65
    store.record(made.pk, made.place, Place(log.end()))
    now = datetime.now(UTC)
    ticks = iter([now, now + timedelta(days=8)])
    store.sweep(Clock(lambda: next(ticks), lambda: 0.0))  # it jumped: no event is deleted by its age
    assert store.replay(webhooks.get(made.id)) == 65
    store.record(made.pk, Place(Position(0, 0)), Place(Position(0, 0), GIVE_UP_AFTER.total_seconds(), now, "away"))
    store.sweep(Clock())  # it is switched off, and nothing waits for it
    assert read_all(log) == []


def test_nothing_is_stored_after_nobody_read_for_a_week(database: Database, log: EventLog, gallery: Gallery) -> None:
    store = ReceiverStore(database)
    store.claim("stream")  # again: it is extended
    report(database, gallery, decision(1))
    store.sweep(Clock())
    assert read_all(log) == [1]
    assert list(WebhookStore(database).list_all()) == []
    with database.write(StorageError("conflict")) as connection:
        connection.execute(receivers.update().values(used_at=datetime.now(UTC) - timedelta(days=8)))
    store.sweep(Clock())
    report(database, Store(database).galleries.get("g"), decision(2))
    assert read_all(log) == []
    with database.read() as connection:
        assert connection.execute(sa.select(receivers)).all() == []
    store.claim("stream")
    report(database, gallery, decision(3))
    assert read_all(log) == [3]


def test_a_log_from_another_postgresql_server_goes_on(database: Database, log: EventLog, gallery: Gallery) -> None:
    if database.file is not None:
        pytest.skip("SQLite has no numbers of transactions")
    made = WebhookStore(database).create("https://receiver.example/", None, EventFilter())
    report(database, gallery, decision(0))
    far = log.end().xid + 1_000_000
    with database.write(StorageError("conflict")) as connection:
        connection.execute(events.update().values(xid=far))
        connection.execute(receivers.update().values(xid=far + 1, event_pk=0))
    ReceiverStore(database).sweep(Clock())
    report(database, gallery, decision(1))
    assert read_all(log) == [0, 1]
    assert [webhook.id for webhook in ReceiverStore(database).waiting()] == [made.id]


def test_events_of_nobody_known_are_not_stored(database: Database, log: EventLog, gallery: Gallery) -> None:
    report(database, gallery, Event("decision", {"outcome": "identified", "number": 1}, "nobody"))
    assert read_all(log) == []  # the subject does not exist any more
    with pytest.raises(StorageError):
        report(database, gallery, Event("stranger_first_seen", {"number": 2}, stranger_pk=99))
    assert read_all(log) == []


def test_a_merge_keeps_the_events_of_both(database: Database, log: EventLog, gallery: Gallery) -> None:
    store = Store(database)
    for number, name in enumerate(("ada", "bob")):
        store.subjects.put(gallery, name, None, {}, [])
        report(database, gallery, Event("decision", {"outcome": "identified", "number": number}, name))
    store.subjects.merge(store.galleries.get("g"), "bob", "ada")
    assert read_all(log) == [0, 1]
    store.subjects.delete(store.galleries.get("g"), "ada")
    assert read_all(log) == []

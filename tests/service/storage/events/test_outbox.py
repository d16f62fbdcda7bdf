"""Events: stored if and only if what they report is, read in order, bounded, and erased with their subjects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from service.core.actor import Threads
from service.core.errors import StorageError
from service.domain.events import GIVE_UP_AFTER, Event, EventFilter, Position
from service.domain.gallery import Gallery, GallerySettings, Item, NewTemplate
from service.operations.housekeeping import Housekeeping
from service.operations.progress import Progress
from service.storage.audit.log import record_entries
from service.storage.db.engine import Database
from service.storage.db.tables import events, leases, receivers
from service.storage.events.log import PAGE, EventLog, StoredEvent
from service.storage.events.outbox import XID, Place, Webhook, publish
from service.storage.privacy.retention import Retention
from service.storage.repositories import erasures
from service.storage.repositories import receivers as receiver_repository
from service.storage.repositories import webhooks as webhook_repository
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.receivers import ReceiverStore
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import ON_BOTH, ON_POSTGRESQL, open_database
from tests.refusals import raises_code
from tests.service.storage.scene import some

BEGIN = Position(0, 0)
URL = "https://receiver.example/kith?token=hidden"


@pytest.fixture
def gallery(store: Store) -> Gallery:
    return store.galleries.create("g", "f" * 32, 8, GallerySettings())


@pytest.fixture
def outbox(database: Database) -> EventLog:
    return EventLog(database)


def subscribe(database: Database, **chosen: Any) -> Webhook:
    made = WebhookStore(database).create(URL, "door", EventFilter(**chosen))
    return WebhookStore(database).get(made.id)


def pending(outbox: EventLog) -> list[dict[str, Any]]:
    """Return the bodies of all stored events."""
    page = outbox.read(BEGIN, EventFilter())
    assert not page.has_more
    return [event.document for event in page.events]


def stored(database: Database) -> int:
    with database.read() as connection:
        tables = (events, leases)
        return sum(connection.execute(sa.select(sa.func.count()).select_from(t)).scalar_one() for t in tables)


def enroll(store: Store, gallery: Gallery, subject: str, rng: np.random.Generator) -> list[NewTemplate]:
    new = some(rng, 2)
    store.templates.enroll(gallery, subject, new, None)
    return new


def test_nothing_is_written_for_nobody(
    database: Database, store: Store, gallery: Gallery, outbox: EventLog, rng: np.random.Generator
) -> None:
    enroll(store, gallery, "ada", rng)
    record_entries(database, [], [(gallery, [Event("decision", {"outcome": "unknown"})])])
    subscribe(database, types=["drift"])
    subscribe(database, galleries=["another"])
    enroll(store, gallery, "ada", rng)
    assert pending(outbox) == []
    ReceiverStore(database).sweep(datetime.now(UTC))
    assert stored(database) == 0


@ON_BOTH
def test_writes_are_reported_in_order(
    database: Database, store: Store, gallery: Gallery, outbox: EventLog, rng: np.random.Generator
) -> None:
    subscribe(database)
    jobs = JobStore(database)
    enroll(store, gallery, "ada", rng)
    seen = Event("decision", {"outcome": "identified", "subject": "ada"}, "ada")
    record_entries(database, [], [(gallery, [seen])])
    jobs.create(gallery, "enrollment", {}, "j" * 32)
    job = jobs.claim("here", 60)
    assert job is not None
    jobs.enroll(job, store.galleries.get("g"), "bob", [("bob/1.jpg", some(rng)[0])], [], 1)
    jobs.finish(job, "succeeded")
    jobs.cancel(jobs.create(gallery, "enrollment", {}).id)
    (template,) = some(rng)
    for _ in range(2):  # the second import finds the template present
        BulkStore(database).add(store.galleries.get("g"), [Item("eve", template)], {})
    found = pending(outbox)
    assert [(f["type"], f["data"].get("subject")) for f in found] == [
        ("enrollment", "ada"),
        ("decision", "ada"),
        ("enrollment", "bob"),
        ("job_finished", None),
        ("job_finished", None),
        ("enrollment", None),
    ]
    assert {f["data"]["gallery"] for f in found} == {"g"}
    assert found[0]["data"] == {"gallery": "g", "subject": "ada", "template_count": 2}
    assert (found[3]["data"]["state"], found[3]["data"]["done_count"]) == ("succeeded", 1)
    assert found[4]["data"]["state"] == "canceled"
    assert found[5]["data"] == {"gallery": "g", "subject_count": 1, "template_count": 1}
    (waiting,) = ReceiverStore(database).waiting()
    assert ReceiverStore(database).waiting_counts() == {waiting.pk: len(found)}


def test_an_event_is_rolled_back_with_its_cause(database: Database, gallery: Gallery, outbox: EventLog) -> None:
    subscribe(database)
    for fails in (True, False):
        with suppress(StorageError), database.change(gallery) as connection:
            publish(database.vault, connection, gallery, [Event("decision", {"outcome": "unknown", "fails": fails})])
            if fails:
                raise StorageError("the cause fails")
    assert [f["data"]["fails"] for f in pending(outbox)] == [False]


@ON_BOTH
def test_events_are_of_subjects_that_exist_and_go_with_them(
    database: Database, store: Store, gallery: Gallery, outbox: EventLog, rng: np.random.Generator
) -> None:
    subscribe(database)
    store.galleries.create("other", "f" * 32, 8, GallerySettings())

    def left() -> list[tuple[str, str]]:
        return [(each["data"]["gallery"], each["type"]) for each in pending(outbox)]

    for name in ("ada", "bob", "eve"):
        enroll(store, store.galleries.get("other" if name == "eve" else "g"), name, rng)
        report(database, decision(1, name))  # of eve: in a gallery without her
    with pytest.raises(StorageError):
        report(database, Event("stranger_first_seen", {"number": 9}, stranger_pk=99))
    assert left() == [("g", "enrollment"), ("g", "decision")] * 2 + [("other", "enrollment")]
    store.subjects.merge(gallery, "bob", "ada")
    assert len(left()) == 5
    store.subjects.delete(store.galleries.get("g"), "ada")
    assert left() == [("other", "enrollment")]
    enroll(store, store.galleries.get("g"), "ada", rng)
    store.galleries.delete("g")
    record_entries(database, [], [(gallery, [decision(1)])])
    assert left() == [("other", "enrollment")]


def test_an_altered_webhook_receives_nothing_and_stops_nobody(
    database: Database, store: Store, gallery: Gallery, outbox: EventLog, rng: np.random.Generator
) -> None:
    altered, other = subscribe(database), subscribe(database)
    assert not any(word in repr(altered) for word in ("receiver", altered.secret))
    with database.write(StorageError("conflict")) as connection:
        sealed = connection.execute(sa.select(receivers.c.sealed).where(receivers.c.id == other.id)).scalar_one()
        connection.execute(receivers.update().where(receivers.c.id == altered.id).values(sealed=sealed))
    enroll(store, gallery, "ada", rng)
    assert [webhook.id for webhook in ReceiverStore(database).waiting()] == [other.id]
    with raises_code("webhook_not_found"):
        WebhookStore(database).get(altered.id)
    WebhookStore(database).delete(altered.id)
    assert [webhook.id for webhook in WebhookStore(database).list_all()] == [other.id]


def test_galleries_know_who_wants_their_decisions(url: str, database: Database, store: Store, gallery: Gallery) -> None:
    assert store.galleries.get("g").listeners == ()
    elsewhere = open_database(url)  # another process
    first = subscribe(elsewhere, outcomes=["unknown"])
    subscribe(elsewhere, types=["drift"])
    subscribe(elsewhere, galleries=["another"])
    assert store.galleries.get("g").listeners == (first.filter,)
    WebhookStore(elsewhere).delete(first.id)
    assert store.galleries.get("g").listeners == ()
    elsewhere.close()


# The log


@pytest.fixture
def log(database: Database, gallery: Gallery) -> EventLog:
    ReceiverStore(database).claim("stream")
    return EventLog(database)


def decision(number: int, subject: str | None = None, outcome: str = "unknown") -> Event:
    return Event("decision", {"outcome": outcome, "number": number, "false_alarm_probability": number / 1000}, subject)


def report(database: Database, *new: Event, name: str = "g") -> None:
    record_entries(database, [], [(Store(database).galleries.get(name), new)])


def read_all(log: EventLog, after: Position = BEGIN) -> list[int]:
    numbers, has_more = list[int](), True
    while has_more:
        found, after, has_more = log.read(after, EventFilter())
        numbers += [event.document["data"]["number"] for event in found]
    return numbers


def age(database: Database, days: int) -> None:
    """Make all stored events and receivers older."""
    then = datetime.now(UTC) - timedelta(days=days)
    with database.write(StorageError("conflict")) as connection:
        connection.execute(events.update().values(at=then))
        connection.execute(receivers.update().values(used_at=then))


@ON_BOTH
def test_events_are_read_in_order(database: Database, log: EventLog) -> None:
    count = 2 * PAGE + 1
    report(database, *(decision(number) for number in range(count)))
    assert read_all(log) == list(range(count))
    first = log.read(BEGIN, EventFilter()).events[0]
    assert read_all(log, first.position) == list(range(1, count))
    assert first.document.keys() == {"type", "timestamp", "data"}


@ON_POSTGRESQL
def test_an_event_that_commits_late_is_not_passed_over(database: Database, log: EventLog, gallery: Gallery) -> None:
    Store(database).galleries.create("other", "f" * 32, 8, GallerySettings())
    report(database, decision(0))
    began = log.end()
    with database.write(StorageError("conflict")) as connection:
        connection.execute(XID)  # as a first write does
        report(database, decision(2), name="other")  # of a later transaction, which commits earlier
        assert read_all(log, began) == []
        publish(database.vault, connection, gallery, [decision(1)])
    assert read_all(log, began) == [1, 2]


@ON_BOTH
def test_a_bounded_number_stays_stored_for_a_bounded_time(
    database: Database, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none after a week without a reader."""
    monkeypatch.setattr(receiver_repository, "MAX_KEPT", 3)
    store = ReceiverStore(database)
    report(database, *(decision(number) for number in range(9)))
    Housekeeping(Store(database), Retention(database)).look()  # sweeps
    assert read_all(log) == [6, 7, 8]
    _, floor, _ = store.built_in("stream")
    assert len(read_all(log, floor.position)) == 3  # streams behind it learn that they missed events
    age(database, 8)
    store.claim("stream")  # used again: its time is extended
    store.sweep(datetime.now(UTC))
    assert read_all(log) == []
    assert store.built_in("stream")[1].position > floor.position
    report(database, decision(1))
    assert read_all(log) == [1]
    age(database, 8)
    store.sweep(datetime.now(UTC))
    report(database, decision(2))
    with database.read() as connection:
        assert connection.execute(sa.select(receivers)).all() == []
    store.claim("stream")
    report(database, decision(3))
    assert read_all(log) == [3]


@ON_BOTH
def test_events_that_a_receiver_waits_for_outlive_a_clock_that_is_ahead(database: Database, log: EventLog) -> None:
    store, made = ReceiverStore(database), subscribe(database)
    report(database, *(decision(number) for number in range(65)))
    age(database, 8)  # as a clock sees them that is eight days ahead
    store.sweep(datetime.now(UTC))
    assert len(read_all(log)) == 65
    store.record(made.pk, made.place, Place(log.end()))
    now = datetime.now(UTC)
    store.sweep(None)  # it is known to be wrong: no event is deleted by its age
    assert store.replay(WebhookStore(database).get(made.id)) == 65
    store.record(made.pk, Place(Position(0, 0)), Place(Position(0, 0), GIVE_UP_AFTER.total_seconds(), now, "away"))
    store.sweep(datetime.now(UTC))  # it is switched off, and nothing waits for it
    assert read_all(log) == []


@ON_POSTGRESQL
def test_a_log_from_another_postgresql_server_goes_on(database: Database, log: EventLog) -> None:
    made = subscribe(database)
    report(database, decision(0))
    far = log.end().xid + 1_000_000
    with database.write(StorageError("conflict")) as connection:
        connection.execute(events.update().values(xid=far))
        connection.execute(receivers.update().values(xid=far + 1, event_pk=0))
    ReceiverStore(database).sweep(datetime.now(UTC))
    report(database, decision(1))
    assert read_all(log) == [0, 1]
    assert [webhook.id for webhook in ReceiverStore(database).waiting()] == [made.id]


# At the same time


def test_a_webhook_beyond_the_limit_is_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_repository, "MAX_WEBHOOKS", 1)
    subscribe(database)
    with raises_code("too_many_webhooks"):
        subscribe(database)


@ON_POSTGRESQL
def test_no_event_of_a_subject_is_stored_while_it_is_erased(
    database: Database, store: Store, gallery: Gallery, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    enroll(store, gallery, "ada", rng)
    subscribe(database)
    erase, reporting = erasures.erase, threading.Thread(target=report, args=(database, decision(1, "ada")))

    def erase_and_report(*given: Any) -> Any:
        result = erase(*given)
        reporting.start()
        reporting.join(0.3)  # it may have to wait for the erasure
        return result

    monkeypatch.setattr(erasures, "erase", erase_and_report)
    store.subjects.delete(gallery, "ada")
    reporting.join(10)
    assert pending(EventLog(database)) == []


Attempt = Callable[[StoredEvent], Awaitable[bool]]


def send(
    database: Database, to: Webhook, attempt: Attempt, wanted: EventFilter, may_send: Callable[[], bool] = lambda: True
) -> Place:
    """Send a page of events; return the place after it."""

    async def work() -> Place:
        with Threads(1, "sender") as threads:
            progress = Progress(ReceiverStore(database), threads, to.pk, to.place)
            await progress.send(EventLog(database), wanted, attempt, may_send)
            return progress.place

    return asyncio.run(work())


def test_unwanted_events_are_passed_over(database: Database, log: EventLog) -> None:
    async def attempt(event: StoredEvent) -> bool:
        raise AssertionError(event)

    made = subscribe(database)
    report(database, decision(1), decision(2))
    assert send(database, made, attempt, EventFilter(types=["drift"])).position == log.end()


@ON_BOTH
@pytest.mark.parametrize(("what", "numbers"), [("webhook", [0]), ("subject", [0, 2]), ("lease", [0])])
def test_waiting_events_are_not_sent_after_a_deletion_or_by_another_process(
    database: Database, store: Store, gallery: Gallery, what: str, numbers: list[int], rng: np.random.Generator
) -> None:
    enroll(store, gallery, "ada", rng)
    made, _, sent = subscribe(database), subscribe(database), list[int]()
    report(database, decision(0, "ada"), decision(1, "ada"), decision(2))

    async def attempt(event: StoredEvent) -> bool:
        sent.append(event.document["data"]["number"])
        if what == "webhook":
            store.webhooks.delete(made.id)
        elif what == "subject":
            store.subjects.delete(gallery, "ada")
        return True

    send(database, made, attempt, EventFilter(), lambda: what != "lease" or not sent)
    assert sent == numbers

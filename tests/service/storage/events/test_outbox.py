"""The outbox: an event is stored if and only if what it reports is, and without receivers nothing is written."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from service.core.clock import Clock
from service.core.errors import StorageError
from service.domain.events import Event, EventFilter, Position
from service.domain.gallery import Gallery, GallerySettings, NewTemplate
from service.storage.audit.log import record_entries
from service.storage.db.engine import Database
from service.storage.db.tables import events, leases, receivers
from service.storage.events.log import EventLog
from service.storage.events.outbox import Webhook, publish
from service.storage.repositories import webhooks as webhook_repository
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.receivers import ReceiverStore
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import ON_BOTH, open_database
from tests.refusals import raises_code
from tests.service.storage.privacy.test_erasure import items_of, some

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
    page = outbox.read(Position(0, 0), EventFilter())
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
    subscribe(database, types=frozenset({"drift"}))
    subscribe(database, galleries=frozenset({"another"}))
    enroll(store, gallery, "ada", rng)
    assert pending(outbox) == []
    ReceiverStore(database).sweep(Clock())
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
    found = pending(outbox)
    assert [(f["type"], f["data"].get("subject")) for f in found] == [
        ("enrollment", "ada"),
        ("decision", "ada"),
        ("enrollment", "bob"),
        ("job_finished", None),
        ("job_finished", None),
    ]
    assert {f["data"]["gallery"] for f in found} == {"g"}
    assert found[0]["data"] == {"gallery": "g", "subject": "ada", "template_count": 2}
    assert (found[3]["data"]["state"], found[3]["data"]["done_count"]) == ("succeeded", 1)
    assert found[4]["data"]["state"] == "canceled"
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
def test_erased_subjects_and_galleries_take_their_events_along(
    database: Database, store: Store, gallery: Gallery, outbox: EventLog, rng: np.random.Generator
) -> None:
    subscribe(database)
    other = store.galleries.create("other", "f" * 32, 8, GallerySettings())
    for name in ("ada", "bob"):
        enroll(store, gallery, name, rng)
        enroll(store, other, name, rng)
    before = len(pending(outbox))
    store.subjects.delete(gallery, "ada")
    assert len(pending(outbox)) == before - 1
    late = [Event("decision", {"outcome": "identified", "subject": name}, name) for name in ("ada", "bob")]
    record_entries(database, [], [(gallery, late)])
    assert [(f["type"], f["data"]["subject"]) for f in pending(outbox) if f["data"]["gallery"] == "g"] == [
        ("enrollment", "bob"),
        ("decision", "bob"),
    ]
    store.galleries.delete("g")
    record_entries(database, [], [(gallery, late)])
    assert {f["data"]["gallery"] for f in pending(outbox)} == {"other"}


def test_rows_reveal_neither_people_nor_addresses(
    database: Database, store: Store, gallery: Gallery, rng: np.random.Generator
) -> None:
    webhook = subscribe(database)
    enroll(store, gallery, "somebody", rng)
    with database.read() as connection:
        rows = [row for table in (receivers, events) for row in connection.execute(sa.select(table))]
    text = repr([[bytes(v) if isinstance(v, memoryview) else v for v in row] for row in rows])
    assert not any(word in text for word in ("receiver", "hidden", "somebody", webhook.secret, "door"))
    assert not any(word in repr(webhook) for word in ("receiver", webhook.secret))


def test_an_altered_webhook_receives_nothing_and_stops_nobody(
    database: Database, store: Store, gallery: Gallery, outbox: EventLog, rng: np.random.Generator
) -> None:
    altered, other = subscribe(database), subscribe(database)
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
    first = subscribe(elsewhere, outcomes=frozenset({"unknown"}))
    subscribe(elsewhere, types=frozenset({"drift"}))
    subscribe(elsewhere, galleries=frozenset({"another"}))
    assert store.galleries.get("g").listeners == (first.filter,)
    WebhookStore(elsewhere).delete(first.id)
    assert store.galleries.get("g").listeners == ()
    elsewhere.close()


def test_a_webhook_beyond_the_limit_is_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_repository, "MAX_WEBHOOKS", 2)
    subscribe(database)
    subscribe(database)
    with raises_code("too_many_webhooks"):
        subscribe(database)


def test_imports_are_reported(database: Database, gallery: Gallery, outbox: EventLog, rng: np.random.Generator) -> None:
    subscribe(database)
    (template,) = some(rng)
    for _ in range(2):  # the second import finds the template present
        BulkStore(database).add(gallery, items_of("ada", template), {})
    (found,) = pending(outbox)
    assert found["data"] == {"gallery": "g", "subject_count": 1, "template_count": 1}

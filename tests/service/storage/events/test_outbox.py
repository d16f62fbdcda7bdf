"""The outbox: an event is stored if and only if what it reports is, and without receivers nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from service.core.errors import StorageError, TooManyWebhooksError, WebhookNotFoundError
from service.domain.events import Event, EventFilter
from service.domain.gallery import Gallery, GallerySettings, NewTemplate
from service.storage.audit.log import record_entries
from service.storage.db.engine import Database
from service.storage.db.tables import deliveries, events, leases, webhooks
from service.storage.events import deliveries as module
from service.storage.events.deliveries import Attempt, DeliveryStore, DueDelivery
from service.storage.events.outbox import Webhook, publish
from service.storage.repositories import webhooks as webhook_repository
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import open_database
from tests.service.storage.privacy.test_erasure import items_of, some

URL = "https://receiver.example/kith?token=hidden"


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


@pytest.fixture
def gallery(store: Store) -> Gallery:
    return store.galleries.create("g", "f" * 32, 8, GallerySettings())


@pytest.fixture
def outbox(database: Database) -> DeliveryStore:
    return DeliveryStore(database)


def subscribe(database: Database, **chosen: Any) -> Webhook:
    made = WebhookStore(database).create(URL, "door", EventFilter(**chosen))
    return WebhookStore(database).get(made.id)


def pending(outbox: DeliveryStore) -> list[dict[str, Any]]:
    """Return the bodies of all due deliveries."""
    due = outbox.due(set(), 99, 99)
    return [json.loads(d.body) for _, _, stream in due for d in stream if d.body is not None]


def stored(database: Database) -> int:
    with database.read() as connection:
        tables = (events, deliveries, leases)
        return sum(connection.execute(sa.select(sa.func.count()).select_from(t)).scalar_one() for t in tables)


def enroll(store: Store, gallery: Gallery, subject: str, rng: np.random.Generator) -> list[NewTemplate]:
    new = some(rng, 2)
    store.templates.enroll(gallery, subject, new, None)
    return new


def test_nothing_is_written_for_nobody(
    database: Database, store: Store, gallery: Gallery, outbox: DeliveryStore, rng: np.random.Generator
) -> None:
    enroll(store, gallery, "ada", rng)
    record_entries(database, [], [(gallery, [Event("decision", {"outcome": "unknown"})])])
    subscribe(database, types=frozenset({"drift"}))
    subscribe(database, galleries=frozenset({"another"}))
    enroll(store, gallery, "ada", rng)
    assert outbox.due(set(), 9, 9) == []
    outbox.sweep()
    assert stored(database) == 0


def test_writes_are_reported_in_order(
    database: Database, store: Store, gallery: Gallery, outbox: DeliveryStore, rng: np.random.Generator
) -> None:
    webhook = subscribe(database)
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
    listed = outbox.list_page(webhook, [], None, 99)
    assert [(d.type, d.state, d.gallery) for d in listed[::-1]] == [(f["type"], "pending", "g") for f in found]


def test_an_event_is_rolled_back_with_its_cause(database: Database, gallery: Gallery, outbox: DeliveryStore) -> None:
    subscribe(database)
    for fails in (True, False):
        with suppress(StorageError), database.change(gallery) as connection:
            publish(database.vault, connection, gallery, [Event("decision", {"outcome": "unknown", "fails": fails})])
            if fails:
                raise StorageError("the cause fails")
    assert [f["data"]["fails"] for f in pending(outbox)] == [False]


def test_erased_subjects_and_galleries_take_their_events_along(
    database: Database, store: Store, gallery: Gallery, outbox: DeliveryStore, rng: np.random.Generator
) -> None:
    subscribe(database)
    other = store.galleries.create("other", "f" * 32, 8, GallerySettings())
    for name in ("ada", "bob"):
        enroll(store, gallery, name, rng)
        enroll(store, other, name, rng)
    assert store.subjects.delete(gallery, "ada").removed["events"] == 1
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
        rows = [row for table in (webhooks, events, deliveries) for row in connection.execute(sa.select(table))]
    text = repr([[bytes(v) if isinstance(v, memoryview) else v for v in row] for row in rows])
    assert not any(word in text for word in ("receiver", "hidden", "somebody", webhook.secret, "door"))
    assert not any(word in repr(webhook) for word in ("receiver", webhook.secret))


def test_an_altered_webhook_receives_nothing_and_stops_nobody(
    database: Database, store: Store, gallery: Gallery, outbox: DeliveryStore, rng: np.random.Generator
) -> None:
    altered, other = subscribe(database), subscribe(database)
    with database.write(StorageError("conflict")) as connection:
        sealed = connection.execute(sa.select(webhooks.c.sealed).where(webhooks.c.id == other.id)).scalar_one()
        connection.execute(webhooks.update().where(webhooks.c.id == altered.id).values(sealed=sealed))
    enroll(store, gallery, "ada", rng)
    assert [webhook.id for webhook, _, _ in outbox.due(set(), 9, 9)] == [other.id]
    with pytest.raises(WebhookNotFoundError):
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
    with pytest.raises(TooManyWebhooksError):
        subscribe(database)


def test_imports_are_reported(
    database: Database, gallery: Gallery, outbox: DeliveryStore, rng: np.random.Generator
) -> None:
    subscribe(database)
    (template,) = some(rng)
    for _ in range(2):  # the second import finds the template present
        BulkStore(database).add(gallery, items_of("ada", template))
    (found,) = pending(outbox)
    assert found["data"] == {"gallery": "g", "subject_count": 1, "template_count": 1}


# Deliveries


@pytest.fixture
def backlog(
    database: Database, store: Store, gallery: Gallery, outbox: DeliveryStore, rng: np.random.Generator
) -> Iterator[list[DueDelivery]]:
    """Six pending deliveries to one webhook."""
    subscribe(database)
    for number in range(6):
        enroll(store, gallery, f"s{number}", rng)
    ((_, _, due),) = outbox.due(set(), 9, 9)
    yield due


def test_deliveries_behind_one_that_waits_are_not_due(
    outbox: DeliveryStore, database: Database, store: Store, backlog: list[DueDelivery], rng: np.random.Generator
) -> None:
    head, later = backlog[0], outbox.now().replace(year=2100)
    outbox.record([Attempt(head.pk, "pending", 1, 500, "the receiver returned status 500", later)])
    assert outbox.due(set(), 9, 9) == []
    other = store.galleries.create("other", "f" * 32, 8, GallerySettings())
    enroll(store, other, "ada", rng)
    ((_, gallery_pk, _),) = outbox.due(set(), 9, 9)
    assert gallery_pk == other.pk  # galleries do not wait for each other
    outbox.record([Attempt(head.pk, "dead", 2, 500, "the receiver returned status 500", None)])
    found = {gallery_pk: due for _, gallery_pk, due in outbox.due(set(), 9, 9)}
    assert [d.pk for d in found[min(found)]] == [d.pk for d in backlog[1:]]


def test_one_webhook_leaves_room_for_others(
    outbox: DeliveryStore, database: Database, store: Store, backlog: list[DueDelivery], rng: np.random.Generator
) -> None:
    second = subscribe(database)
    for name in ("a", "b", "c"):
        enroll(store, store.galleries.create(name, "f" * 32, 8, GallerySettings()), "ada", rng)
    first = WebhookStore(database).list_all()[0]
    due = [(webhook.id, gallery_pk) for webhook, gallery_pk, _ in outbox.due({(first.pk, -1)}, 9, 2)]
    assert [webhook_id for webhook_id, _ in due].count(first.id) == 1
    assert [webhook_id for webhook_id, _ in due].count(second.id) == 2
    assert len(outbox.due({(first.pk, -1)}, 2, 9)) == 1


def test_a_sweep_keeps_what_is_listed(
    outbox: DeliveryStore, database: Database, backlog: list[DueDelivery], monkeypatch: pytest.MonkeyPatch
) -> None:
    (webhook,) = WebhookStore(database).list_all()
    monkeypatch.setattr(module, "KEPT", {"delivered": 1, "dead": 1})
    monkeypatch.setattr(module, "MAX_PENDING", 1)
    delivered, dead = backlog[:2], backlog[2:4]
    outbox.record([Attempt(d.pk, "delivered", 1, 204, None, None) for d in delivered])
    outbox.record([Attempt(d.pk, "dead", 4, 404, "the receiver returned status 404", None) for d in dead])
    outbox.sweep()
    left = {d.pk: d for d in outbox.list_page(webhook, [], None, 99)}
    assert set(left) == {delivered[1].pk, dead[1].pk, backlog[4].pk, backlog[5].pk}
    assert (left[backlog[4].pk].state, left[backlog[4].pk].error) == ("dead", "too many events were waiting")
    assert [d.pk for d in outbox.list_page(webhook, ["pending"], None, 99)] == [backlog[5].pk]
    with database.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(events)).scalar() == len(left)
    WebhookStore(database).delete(webhook.id)
    outbox.sweep()
    assert stored(database) == 0

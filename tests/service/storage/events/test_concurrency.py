"""Events while something else is written: none survives an erasure, no write fails, nothing deadlocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from service.domain.events import Event, EventFilter
from service.domain.gallery import Gallery, GallerySettings
from service.storage.audit.log import record_entries
from service.storage.db.engine import Database
from service.storage.db.tables import events
from service.storage.events import outbox
from service.storage.repositories import erasures
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import ON_BOTH
from tests.receivers import receiving
from tests.service.operations.test_webhook_delivery import sending
from tests.service.storage.privacy.test_erasure import some

pytestmark = ON_BOTH

URL = "https://receiver.example/kith"
DECISION = Event("decision", {"outcome": "unknown"})


def make_gallery(store: Store, name: str = "g") -> Gallery:
    gallery = store.galleries.create(name, "f" * 32, 8, GallerySettings())
    store.templates.enroll(gallery, "ada", some(np.random.default_rng(1), 1), None)
    return store.galleries.get(name)


def found(subject: str) -> Event:
    return Event("decision", {"outcome": "identified", "subject": subject}, subject)


def in_thread(function: Callable[..., Any], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join(1)  # it may have to wait for the caller's transaction
    return thread


def after(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, then: Callable[[], Any]) -> None:
    """Call ``then`` once, after the first call of a function of a module."""
    function = getattr(module, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(module, name, function)
        result = function(*arguments, **named)
        then()
        return result

    monkeypatch.setattr(module, name, wrapped)


def test_no_event_of_a_subject_is_stored_while_it_is_erased(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database.file is not None:
        pytest.skip("SQLite has one writer at a time")
    store = Store(database)
    gallery = make_gallery(store)
    WebhookStore(database).create(URL, None, EventFilter())
    threads: list[threading.Thread] = []
    report = [(gallery, [found("ada")])]
    after(
        monkeypatch,
        erasures,
        "erase",
        lambda: threads.append(in_thread(record_entries, database, [], report)),
    )
    store.subjects.delete(gallery, "ada")
    threads[0].join(10)
    with database.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(events)).scalar() == 0


@pytest.mark.parametrize("kind", ["search", "enrollment"])
def test_writes_succeed_while_a_webhook_is_deleted(
    database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if database.file is not None:
        pytest.skip("SQLite has one writer at a time")
    store, webhooks = Store(database), WebhookStore(database)
    gallery = make_gallery(store)
    made = webhooks.create(URL, None, EventFilter())
    threads: list[threading.Thread] = []
    after(monkeypatch, outbox, "read_webhooks", lambda: threads.append(in_thread(webhooks.delete, made.id)))
    if kind == "search":
        record_entries(database, [], [(gallery, [DECISION])])
    else:
        store.templates.enroll(gallery, "ada", some(np.random.default_rng(2), 1), None)
    threads[0].join(10)
    assert list(webhooks.list_all()) == []


@pytest.mark.parametrize("what", ["webhook", "subject"])
def test_waiting_events_are_not_sent_after_a_deletion(database: Database, what: str) -> None:
    store, webhooks = Store(database), WebhookStore(database)
    gallery = make_gallery(store)
    with receiving() as receiver:
        made = webhooks.create(f"{receiver.origin}/x", None, EventFilter())
        record_entries(database, [], [(gallery, [found("ada") for _ in range(5)])])
        receiver.open.clear()

        async def work() -> None:
            async with sending(database, receiver):
                await asyncio.sleep(0.5)  # the first event is under way
                if what == "webhook":
                    await asyncio.to_thread(webhooks.delete, made.id)
                else:
                    await asyncio.to_thread(store.subjects.delete, gallery, "ada")
                receiver.open.set()
                await asyncio.sleep(1)

        asyncio.run(work())
        assert len(receiver.messages) <= 1

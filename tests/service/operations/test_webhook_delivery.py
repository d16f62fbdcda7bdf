"""Deliveries to a real receiver: signed, in order per gallery, repeated until accepted or dead, by one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from service.core.errors import WebhookRefusedError
from service.domain import events as rules
from service.domain.events import Event, EventFilter
from service.domain.gallery import Gallery, GallerySettings
from service.observability.metrics import Metrics
from service.operations.webhook_delivery import WebhookDelivery, WebhookSender
from service.security.addresses import Hosts
from service.security.outbound_http import OutboundHttp
from service.storage.audit.log import record_entries
from service.storage.db.engine import Database
from service.storage.db.leases import Lease
from service.storage.events.deliveries import Delivery, DeliveryStore
from service.storage.events.outbox import Webhook
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.receivers import Receiver, receiving

PATIENCE_S = 60


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "FIRST_RETRY", timedelta(seconds=0.01))
    monkeypatch.setattr(rules, "RETRY_FACTOR", 1)


@pytest.fixture
def gallery(database: Database) -> Gallery:
    return Store(database).galleries.create("g", "f" * 32, 8, GallerySettings())


@asynccontextmanager
async def sending(database: Database, receiver: Receiver, lease_s: float = 20) -> AsyncIterator[None]:
    async with OutboundHttp(Hosts(), origins=[receiver.origin]) as http:
        store, lease = DeliveryStore(database), Lease(database, "webhooks")
        async with WebhookDelivery(store, lease, WebhookSender(http), Metrics(), poll_s=0.02, lease_s=lease_s):
            yield


def report(database: Database, gallery: Gallery, *numbers: int) -> None:
    new = [Event("decision", {"outcome": "unknown", "number": number}) for number in numbers]
    record_entries(database, [], [(gallery, new)])


def subscribe(database: Database, receiver: Receiver) -> Webhook:
    return WebhookStore(database).create(f"{receiver.origin}/kith?key=1", None, EventFilter())


def ended(database: Database) -> list[Delivery]:
    (webhook,) = WebhookStore(database).list_all()
    return DeliveryStore(database).list_page(webhook, ["delivered", "dead"], None, 999)[::-1]


async def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(is_true):
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    asyncio.run(main())


def test_events_arrive_signed_and_in_order(database: Database, gallery: Gallery, receiver: Receiver) -> None:
    webhook = subscribe(database, receiver)
    report(database, gallery, *range(50))

    async def work() -> None:
        async with sending(database, receiver):
            await until(lambda: len(ended(database)) == 50)

    run(work)
    messages = receiver.messages
    assert [m.document["data"]["number"] for m in messages] == list(range(50))
    assert all(m.is_signed_by(webhook.secret) for m in messages)
    assert [m.id for m in messages] == [d.event for d in ended(database)]
    assert {(m.path, m.headers["content-type"]) for m in messages} == {("/kith?key=1", "application/json")}
    assert messages[0].document.keys() == {"type", "timestamp", "data"}
    assert {(d.state, d.attempts, d.status, d.error) for d in ended(database)} == {("delivered", 1, 204, None)}


def test_a_failed_event_is_repeated_before_later_ones(database: Database, gallery: Gallery, receiver: Receiver) -> None:
    webhook = subscribe(database, receiver)
    receiver.answers += [204, 500, 429, 204]
    report(database, gallery, 1, 2, 3)

    async def work() -> None:
        async with sending(database, receiver):
            await until(lambda: len(ended(database)) == 3)

    run(work)
    assert [m.document["data"]["number"] for m in receiver.messages] == [1, 2, 2, 2, 3]
    repeated = [m for m in receiver.messages if m.document["data"]["number"] == 2]
    assert len({m.id for m in repeated}) == 1
    assert len({m.body for m in repeated}) == 1
    assert all(m.is_signed_by(webhook.secret) for m in repeated)
    assert [d.attempts for d in ended(database)] == [1, 3, 1]


def test_a_refused_event_is_dead_and_visible(database: Database, gallery: Gallery, receiver: Receiver) -> None:
    subscribe(database, receiver)
    receiver.answers += [302] + [404] * (rules.MAX_REFUSALS - 1)
    report(database, gallery, 1, 2)

    async def work() -> None:
        async with sending(database, receiver):
            await until(lambda: len(ended(database)) == 2)

    run(work)
    dead, delivered = ended(database)
    assert (dead.state, dead.attempts, dead.status) == ("dead", rules.MAX_REFUSALS, 404)
    assert dead.error == "the receiver returned status 404"
    assert delivered.state == "delivered"
    assert {m.path for m in receiver.messages} == {"/kith?key=1"}  # the redirect was not followed


def test_dead_events_are_sent_again_on_request(database: Database, gallery: Gallery, receiver: Receiver) -> None:
    webhook = subscribe(database, receiver)
    receiver.answers += [404] * rules.MAX_REFUSALS
    report(database, gallery, 1, 2)
    store = DeliveryStore(database)

    async def work() -> None:
        async with sending(database, receiver):
            await until(lambda: len(ended(database)) == 2)
            assert await asyncio.to_thread(store.replay, webhook) == 1
            await until(lambda: [each.state for each in ended(database)] == ["delivered"] * 2)

    run(work)
    assert [m.document["data"]["number"] for m in receiver.messages] == [1] * rules.MAX_REFUSALS + [2, 1]
    assert len({m.id for m in receiver.messages if m.document["data"]["number"] == 1}) == 1
    assert [each.attempts for each in ended(database)] == [1, 1]
    assert store.replay(webhook) == 0


def test_an_event_is_given_up_after_a_day(
    database: Database, gallery: Gallery, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "GIVE_UP_AFTER", timedelta(seconds=0))
    subscribe(database, receiver)
    receiver.status = 503
    report(database, gallery, 1)

    async def work() -> None:
        async with sending(database, receiver):
            await until(lambda: len(ended(database)) == 1)

    run(work)
    assert [(d.state, d.attempts, d.status) for d in ended(database)] == [("dead", 1, 503)]


def test_a_receiver_that_is_away_or_silent_is_an_error(database: Database, receiver: Receiver) -> None:
    webhook = subscribe(database, receiver)

    async def work() -> None:
        async with OutboundHttp(Hosts(), origins=[receiver.origin, "http://127.0.0.1:1"]) as http:
            sender = WebhookSender(http)
            assert (await sender.test(webhook)).status == 204
            receiver.open.clear()
            answer = await WebhookSender(http, timeout_s=0.5).test(webhook)
            assert (answer.status, answer.error) == (None, "no response within 0.5 s")
            receiver.open.set()
            nobody = WebhookStore(database).create("http://127.0.0.1:1/", None, EventFilter())
            assert (await sender.test(nobody)).error == "no connection could be made"
            elsewhere = WebhookStore(database).create("http://127.0.0.1:2/", None, EventFilter())
            assert (await sender.test(elsewhere)).error == "the address is not allowed, or its host does not exist"

    run(work)
    assert receiver.messages[0].document["type"] == "test"


@pytest.mark.parametrize(
    "url",
    [
        "http://receiver.example/",  # not https
        "https://other.example/",
        "https://127.0.0.1/",
        "https://user:password@receiver.example/",
        "https://receiver.example:8443/",
        "http://10.0.0.5:8124/",
        "https://10.0.0.5:8123/",
        "http://user@10.0.0.5:8123/",
        "http://10.0.0.5:8123@other.example/",
        "ftp://receiver.example/",
        "x",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    async def work() -> None:
        async with OutboundHttp(Hosts.of_text("receiver.example"), origins=["http://10.0.0.5:8123"]) as http:
            sender = WebhookSender(http)
            sender.check("https://receiver.example/hook")
            sender.check("http://10.0.0.5:8123/hook?a=b")
            with pytest.raises(WebhookRefusedError):
                sender.check(url)

    run(work)


def test_one_process_sends_and_the_next_takes_over(database: Database, gallery: Gallery, receiver: Receiver) -> None:
    subscribe(database, receiver)

    async def work() -> None:
        async with sending(database, receiver, lease_s=0.5), sending(database, receiver, lease_s=0.5):
            report(database, gallery, *range(30))
            await until(lambda: len(ended(database)) == 30)
        assert [m.document["data"]["number"] for m in receiver.messages] == list(range(30))
        lease = Lease(database, "webhooks")
        assert lease.acquire("dead", DeliveryStore(database).now(), timedelta(seconds=1))
        report(database, gallery, 30)
        began = time.monotonic()
        async with sending(database, receiver, lease_s=0.5):
            await until(lambda: len(ended(database)) == 31)
        assert time.monotonic() - began > 0.5  # while the dead process's lease lasted

    run(work)


def test_a_stopped_process_leaves_the_rest_to_the_next(
    database: Database, gallery: Gallery, receiver: Receiver
) -> None:
    subscribe(database, receiver)
    report(database, gallery, 1, 2, 3)
    receiver.open.clear()

    async def stopped() -> None:
        async with sending(database, receiver):
            await asyncio.sleep(0.5)

    async def work() -> None:
        async with sending(database, receiver):
            await until(lambda: len(ended(database)) == 3)

    run(stopped)
    assert ended(database) == []
    receiver.open.set()
    run(work)
    numbers = [m.document["data"]["number"] for m in receiver.messages]
    assert [n for i, n in enumerate(numbers) if n not in numbers[:i]] == [1, 2, 3]

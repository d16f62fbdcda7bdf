"""Deliveries to a real receiver: signed, in order, repeated until accepted, by one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from service.core.errors import StorageError
from service.domain import events as rules
from service.domain.events import Event, EventFilter
from service.domain.gallery import Gallery, GallerySettings
from service.observability.metrics import Metrics
from service.operations import progress
from service.operations.webhook_delivery import WebhookDelivery, WebhookSender
from service.security.addresses import Hosts
from service.security.outbound_http import OutboundHttp
from service.storage.audit.log import record_entries
from service.storage.db.engine import Database
from service.storage.db.leases import Lease
from service.storage.events import outbox
from service.storage.events.log import EventLog
from service.storage.events.outbox import Place, Webhook
from service.storage.repositories import receivers as places
from service.storage.repositories.receivers import ReceiverStore
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.conftest import is_eventually
from tests.databases import ON_BOTH
from tests.receivers import Receiver, receiving
from tests.refusals import raises_code


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
async def sending(
    database: Database, *receivers: Receiver, lease_s: float = 20, poll_s: float = 0.02
) -> AsyncIterator[None]:
    async with OutboundHttp(Hosts(), origins=[receiver.origin for receiver in receivers]) as http:
        store, lease, sender = ReceiverStore(database), Lease(database, "webhooks", lease_s), WebhookSender(http)
        async with WebhookDelivery(EventLog(database), store, lease, sender, Metrics(), poll_s=poll_s):
            yield


def report(database: Database, gallery: Gallery, *numbers: int, at: datetime | None = None) -> None:
    when = datetime.now(UTC) if at is None else at
    new = [Event("decision", {"outcome": "unknown", "number": number}, at=when) for number in numbers]
    record_entries(database, [], [(gallery, new)])


def subscribe(database: Database, receiver: Receiver, path: str = "/kith?key=1") -> Webhook:
    return WebhookStore(database).create(f"{receiver.origin}{path}", None, EventFilter())


def waiting(database: Database) -> int:
    """Return the number of events after the recorded places of all receivers."""
    return sum(ReceiverStore(database).waiting_counts().values())


def place(database: Database) -> Place:
    webhook, *_ = WebhookStore(database).list_all()
    return webhook.place


def numbers_of(receiver: Receiver) -> list[int]:
    return [message.document["data"]["number"] for message in receiver.messages]


async def until(is_true: Callable[[], bool]) -> None:
    await asyncio.to_thread(is_eventually, is_true)


def deliver(database: Database, *receivers: Receiver, is_done: Callable[[], bool] | None = None) -> None:
    """Send events until none waits."""

    async def work() -> None:
        async with sending(database, *receivers):
            await until(is_done or (lambda: waiting(database) == 0))

    asyncio.run(work())


def test_a_failed_event_is_repeated_before_later_ones(database: Database, gallery: Gallery, receiver: Receiver) -> None:
    webhook = subscribe(database, receiver)
    receiver.answers += [204, 500, 429, 302, 404, 204]
    report(database, gallery, 1, 2, 3)
    deliver(database, receiver)
    assert numbers_of(receiver) == [1, 2, 2, 2, 2, 2, 3]
    repeated = [m for m in receiver.messages if m.document["data"]["number"] == 2]
    assert len({m.id for m in repeated}) == 1
    assert len({m.body for m in repeated}) == 1
    assert all(m.is_signed_by(webhook.secret) for m in repeated)
    assert {(m.path, m.headers["content-type"]) for m in receiver.messages} == {("/kith?key=1", "application/json")}
    assert receiver.messages[0].document.keys() == {"type", "timestamp", "data"}
    assert place(database) == Place(place(database).position)  # nothing is left of the failures


def test_a_receiver_that_fails_delays_no_other(database: Database, gallery: Gallery, receiver: Receiver) -> None:
    with receiving() as failing:
        failing.status = 500
        for each in (failing, receiver):
            subscribe(database, each)
        report(database, gallery, *range(30))
        deliver(
            database,
            receiver,
            failing,
            is_done=lambda: len(receiver.messages) == 30 and len(failing.messages) > 1,
        )
        assert numbers_of(receiver) == list(range(30))
        assert set(numbers_of(failing)) == {0}


def test_a_receiver_says_when_it_is_tried_again(
    database: Database, gallery: Gallery, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe(database, receiver)
    receiver.answers += [503]
    receiver.retry_after = "1"
    report(database, gallery, 1)
    began = time.monotonic()
    deliver(database, receiver)
    assert time.monotonic() - began > 1
    receiver.answers += [429]
    receiver.retry_after = "99999999"
    monkeypatch.setattr(rules, "LONGEST_RETRY", timedelta(seconds=0.1))
    report(database, gallery, 2)
    deliver(database, receiver)
    assert numbers_of(receiver) == [1, 1, 2, 2]


def test_a_receiver_that_fails_for_a_week_is_switched_off(
    database: Database, gallery: Gallery, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe(database, receiver)
    for module in (progress, outbox, places):
        monkeypatch.setattr(module, "GIVE_UP_AFTER", timedelta(seconds=0.3))
    receiver.status = 503
    report(database, gallery, 1)
    deliver(database, receiver, is_done=lambda: place(database).is_off)
    sent = len(receiver.messages)
    assert sent > 1
    assert place(database).failing_since is not None
    report(database, gallery, 99)  # it is not stored for this receiver
    deliver(database, receiver, is_done=lambda: not ReceiverStore(database).waiting())
    assert numbers_of(receiver) == [1] * sent
    assert len({message.id for message in receiver.messages}) == 1


@ON_BOTH
def test_no_clock_delays_an_event(
    database: Database, gallery: Gallery, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a decision while the clock was a day ahead, nor PostgreSQL's clock behind that of the service."""
    subscribe(database, receiver)
    for number, days in ((1, 1), (2, -30), (3, 0)):
        report(database, gallery, number, at=datetime.now(UTC) + timedelta(days=days))
    behind = datetime.now(UTC) - timedelta(seconds=60)
    monkeypatch.setattr(Database, "now", lambda *_: behind)
    began = time.monotonic()
    deliver(database, receiver, is_done=lambda: len(receiver.messages) == 3)
    assert time.monotonic() - began < 20
    assert numbers_of(receiver) == [1, 2, 3]


def test_an_event_is_sent_once_while_its_result_cannot_be_recorded(
    database: Database, gallery: Gallery, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe(database, receiver)
    report(database, gallery, 1, 2)

    def fail(*_: object) -> bool:
        raise StorageError("no space left")

    async def work() -> None:
        async with sending(database, receiver):
            with monkeypatch.context() as patch:
                patch.setattr(ReceiverStore, "record", fail)
                await until(lambda: len(receiver.messages) >= 2)
                await asyncio.to_thread(report, database, gallery, 3)
                await until(lambda: len(receiver.messages) >= 3)
                await asyncio.sleep(0.5)
            await until(lambda: waiting(database) == 0)

    asyncio.run(work())
    assert numbers_of(receiver) == [1, 2, 3]


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

    asyncio.run(work())
    assert receiver.messages[0].document["type"] == "test"


@pytest.mark.parametrize(
    "url",
    [
        "http://receiver.example/",  # not https
        "http://10.0.0.5:8124/",
        "https://10.0.0.5:8123/",
        "http://user@10.0.0.5:8123/",
        "http://10.0.0.5:8123@other.example/",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    """tests/service/inference/test_url_fetching.py has those that no setting allows."""
    sender = WebhookSender(OutboundHttp(Hosts.of_text("receiver.example"), origins=["http://10.0.0.5:8123"]))
    sender.check("https://receiver.example/hook")
    sender.check("http://10.0.0.5:8123/hook?a=b")
    with raises_code("webhook_refused"):
        sender.check(url)


@ON_BOTH
def test_one_process_sends_and_the_next_takes_over(database: Database, gallery: Gallery, receiver: Receiver) -> None:
    subscribe(database, receiver)

    async def work() -> None:
        async with sending(database, receiver, lease_s=0.5), sending(database, receiver, lease_s=0.5):
            report(database, gallery, *range(30))
            await until(lambda: len(receiver.messages) == 30)
        assert [m.document["data"]["number"] for m in receiver.messages] == list(range(30))
        assert Lease(database, "webhooks", 1).hold()  # of a process that dies
        report(database, gallery, 30)
        began = time.monotonic()
        async with sending(database, receiver, lease_s=0.5):
            await until(lambda: len(receiver.messages) == 31)
        assert time.monotonic() - began > 0.5  # while the dead process's lease lasted

    asyncio.run(work())


def test_a_stopped_process_leaves_the_rest_to_the_next(
    database: Database, gallery: Gallery, receiver: Receiver
) -> None:
    subscribe(database, receiver)
    report(database, gallery, 1, 2, 3)
    receiver.open.clear()
    began = time.monotonic()
    deliver(database, receiver, is_done=lambda: time.monotonic() > began + 0.5)
    assert waiting(database) == 3
    receiver.open.set()
    deliver(database, receiver)
    assert [*dict.fromkeys(numbers_of(receiver))] == [1, 2, 3]

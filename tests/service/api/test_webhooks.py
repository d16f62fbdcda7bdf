"""Webhooks through the API: what a receiver gets about real decisions, and nothing for anybody else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from kith.wire.webhooks import WebhookOut
from service.domain.events import Event
from service.server import embedded
from service.settings import load_settings
from tests.commands import run_kith
from tests.conftest import jpeg
from tests.receivers import Receiver, receiving

PHOTO_OR_VECTOR = ("image", "crop", "embedding", "vector", "face", "box", "landmarks")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Receiver]]:
    """A service, and the receiver that it may send to."""
    with receiving() as receiver:
        settings = load_settings(
            data_dir=tmp_path_factory.mktemp("webhooks"), webhook_hosts=receiver.origin, log_level="ERROR"
        )
        with embedded(settings) as url:
            yield url, receiver


@pytest.fixture
def client(place: tuple[str, Receiver]) -> Iterator[Kith]:
    with Kith(place[0]) as kith:
        yield kith
        for webhook in list(kith.webhooks()):
            kith.delete_webhook(webhook.id)
        for gallery in list(kith.galleries()):
            kith.delete_gallery(gallery.name)


@pytest.fixture
def receiver(place: tuple[str, Receiver]) -> Receiver:
    place[1].messages.clear()
    return place[1]


def test_decisions_arrive_as_they_were_answered(
    client: Kith, receiver: Receiver, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8]
) -> None:
    made = client.create_webhook(f"{receiver.origin}/door", types=["decision", "enrollment"], galleries=["door"])
    for name in ("door", "other"):
        client.create_gallery(name)
        client.enroll(name, "ada", jpeg(astronaut), face="largest")
        client.put_subject(name, "ada", name="Ada")
        answers = client.identify(name, jpeg(astronaut)).results + client.identify(name, jpeg(actor)).results
        if name == "door":
            expected = answers
    enrolled, *decisions = receiver.wait_for(1 + len(expected))
    assert enrolled.document["data"] == {"gallery": "door", "subject": "ada", "template_count": 1}
    assert {d.document["type"] for d in decisions} == {"decision"}
    for message, answer in zip(decisions, expected, strict=True):
        data, shown = message.document["data"], answer.model_dump(mode="json", exclude_none=True)
        assert message.is_signed_by(made.secret)
        assert data == {"gallery": "door"} | {name: shown[name] for name in data if name != "gallery"}
        assert {"outcome", "similarity", "threshold", "false_alarm_probability", "risk"} <= set(data)
        assert not any(word in message.body.decode() for word in PHOTO_OR_VECTOR)
    assert [d.document["data"]["outcome"] for d in decisions] == ["identified", "unknown"]
    assert (decisions[0].document["data"]["subject"], decisions[0].document["data"]["name"]) == ("ada", "Ada")


def test_a_filter_keeps_other_decisions_back(
    client: Kith, receiver: Receiver, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8]
) -> None:
    client.create_gallery("door")
    client.enroll("door", "ada", jpeg(astronaut), face="largest")
    client.create_webhook(f"{receiver.origin}/strangers", outcomes=["unknown"], types=["decision"])
    client.create_webhook(f"{receiver.origin}/risky", min_risk=0.0001, types=["decision"])
    client.identify("door", jpeg(astronaut))
    client.identify("door", jpeg(actor))
    messages = receiver.wait_for(2)
    assert sorted((m.path, m.document["data"]["outcome"]) for m in messages) == [
        ("/risky", "unknown"),
        ("/strangers", "unknown"),
    ]


def test_a_webhook_says_where_it_is_and_sends_again(client: Kith, receiver: Receiver) -> None:
    client.create_gallery("door", risk={"threshold": 0.9})
    made = client.create_webhook(f"{receiver.origin}/listed", types=["decision"])
    assert (made.waiting_count, made.failing_since, made.error, made.off) == (0, None, None, False)
    dimension = client.model().dimension
    for row in np.eye(3, dimension):
        client.identify("door", embeddings=[row])
    receiver.wait_for(3)
    shown = waited(lambda: client.webhook(made.id), lambda one: one.waiting_count == 0)
    assert shown.position > made.position
    assert client.test_webhook(made.id).delivered
    assert receiver.wait_for(4)[-1].document["type"] == "test"
    receiver.answers += [410]
    client.identify("door", embeddings=[np.eye(1, dimension)[0]])
    off = waited(lambda: client.webhook(made.id), lambda one: one.off)
    assert (off.waiting_count, off.error) == (1, "the receiver returned status 410")
    assert off.failing_since is not None
    assert off.position == shown.position
    assert [one.off for one in client.webhooks()] == [True]
    count = client.replay_webhook(made.id).replayed_count
    assert count >= 4
    again = receiver.wait_for(5 + count)[5:]
    assert again[-1].id == receiver.messages[4].id
    assert not waited(lambda: client.webhook(made.id), lambda one: one.waiting_count == 0).off
    client.delete_webhook(made.id)
    with pytest.raises(KithClientError, match="webhook_not_found"):
        client.webhook(made.id)
    client.identify("door", embeddings=[np.eye(1, dimension)[0]])
    assert list(client.webhooks()) == []


def waited(read: Callable[[], WebhookOut], is_right: Callable[[WebhookOut], bool]) -> WebhookOut:
    """Read until it is right: a place is recorded after the receiver has answered."""
    for _ in range(10_000):
        if is_right(found := read()):
            return found
    raise AssertionError(found)


def test_addresses_that_the_operator_did_not_allow_are_refused(client: Kith, server: str) -> None:
    for url in ("http://127.0.0.1:1/", "https://receiver.example/", "http://localhost:8000/v1/galleries"):
        with pytest.raises(KithClientError, match="webhook_refused"):
            client.create_webhook(url)
    with Kith(server) as kith, pytest.raises(KithClientError, match="are disabled"):
        kith.create_webhook("https://receiver.example/")


def test_a_secret_is_shown_once(client: Kith, place: tuple[str, Receiver], receiver: Receiver) -> None:
    assert client.create_webhook(receiver.origin).secret.startswith("whsec_")
    assert "whsec_" not in httpx.get(f"{place[0]}/v1/webhooks").text
    assert "webhook_created" in [line.event for line in client.audit()]


def test_decisions_are_refused_if_they_cannot_be_reported(
    place: tuple[str, Receiver], client: Kith, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision whose event is not stored is not acknowledged either."""
    client.create_gallery("door", risk={"threshold": 0.9})
    client.create_webhook(receiver.origin, types=["decision"])
    probe = np.eye(1, client.model().dimension)[0]

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Event, "document", fail)
        with Kith(place[0], attempts=1) as once, pytest.raises(KithClientError, match="audit_unwritten"):
            once.identify("door", embeddings=[probe])
    client.identify("door", embeddings=[probe])
    assert receiver.wait_for(1)[0].document["data"]["outcome"] == "unknown"


def test_webhooks_by_commands(place: tuple[str, Receiver], receiver: Receiver, tmp_path: Path) -> None:
    def ran(*words: str, status: int = 0) -> str:
        environment = {"KITH_URL": place[0], "KITH_LOG_LEVEL": "ERROR"}
        done = run_kith("webhook", *words, cwd=tmp_path, environment=environment)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    secret = ran("create", f"{receiver.origin}/told", "--type", "decision", "--outcome", "unknown", "--name", "Door")
    assert secret.startswith("whsec_") and secret.count("\n") == 1
    (told,) = [each for each in json.loads(ran("list", "--json")) if each["name"] == "Door"]
    assert (told["types"], told["outcomes"], told["url"]) == (["decision"], ["unknown"], f"{receiver.origin}/told")
    assert [told["id"], "Door", told["url"], "works"] in [line.split()[:4] for line in ran("list").splitlines()]
    receiver.answers += [500]
    assert ran("test", told["id"], status=1).startswith("Not delivered: ")
    assert json.loads(ran("test", told["id"], "--json"))["delivered"]
    assert "are sent again" in ran("replay", told["id"])
    ran("delete", told["id"], status=2)
    assert ran("delete", told["id"], "--yes") == f"Deleted webhook {told['id']}\n"
    assert told["id"] not in ran("list")
    ran("create", "http://10.255.255.1/", "--outcome", "nobody", status=3)

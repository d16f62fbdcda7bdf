"""Webhooks through the API: what a receiver gets about real decisions, and nothing for anybody else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kith import Kith
from tests.conftest import is_eventually, jpeg
from tests.receivers import Receiver
from tests.refusals import refusal
from tests.service.api.conftest import KEY, Guarded
from tests.service.cli.conftest import Program

PHOTO_OR_VECTOR = ("image", "crop", "embedding", "vector", "face", "box", "landmarks")


def test_decisions_arrive_as_they_were_answered(
    operator: Kith, receiver: Receiver, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8]
) -> None:
    made = operator.create_webhook(f"{receiver.origin}/door", types=["decision", "enrollment"], galleries=["door"])
    operator.create_webhook(
        f"{receiver.origin}/strangers", types=["decision"], outcomes=["unknown"], galleries=["door"]
    )
    for name in ("door", "other"):
        operator.create_gallery(name)
        operator.enroll(name, "ada", jpeg(astronaut), face="largest")
        operator.put_subject(name, "ada", name="Ada")
        answers = operator.identify(name, jpeg(astronaut)).results + operator.identify(name, jpeg(actor)).results
        if name == "door":
            expected = answers
    messages = receiver.wait_for(len(expected) + 2)
    enrolled, *decisions = [message for message in messages if message.path == "/door"]
    (filtered,) = [message for message in messages if message.path == "/strangers"]
    assert filtered.document["data"]["outcome"] == "unknown"
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


def test_a_webhook_by_commands(guarded: Guarded, operator: Kith, receiver: Receiver, tmp_path: Path) -> None:
    run = Program(tmp_path, guarded.url)
    run("gallery", "list", status=3)
    assert "--api-key" in run.stderr and "KITH_CLIENT_KEY" in run.stderr
    run.environment["KITH_CLIENT_KEY"] = KEY
    operator.create_gallery("door", risk={"threshold": 0.9})
    choice = ("--type", "decision", "--outcome", "unknown", "--name", "Door")
    secret = run("webhook", "create", f"{receiver.origin}/told", *choice)
    assert secret.startswith("whsec_") and secret.count("\n") == 1
    listed = run("webhook", "list", "--json")
    assert "whsec_" not in listed, "a secret is shown once"
    (made,) = json.loads(listed)
    webhook, probes = made["id"], np.eye(2, operator.model().dimension)
    assert (made["types"], made["outcomes"], made["url"]) == (["decision"], ["unknown"], f"{receiver.origin}/told")
    assert (made["waiting_count"], made["failing_since"], made["error"], made["off"]) == (0, None, None, False)

    operator.identify("door", embeddings=[probes[0]])
    receiver.wait_for(1)
    is_eventually(lambda: operator.webhook(webhook).waiting_count == 0)  # recorded after the receiver has answered
    shown = operator.webhook(webhook)
    assert shown.position > made["position"]
    receiver.answers += [500]
    assert run("webhook", "test", webhook, status=1).startswith("Not delivered: ")
    assert json.loads(run("webhook", "test", webhook, "--json"))["delivered"]
    assert receiver.messages[-1].document["type"] == "test"
    receiver.answers += [410]
    operator.identify("door", embeddings=[probes[1]])
    is_eventually(lambda: operator.webhook(webhook).off)
    off = operator.webhook(webhook)
    assert (off.waiting_count, off.error) == (1, "the receiver returned status 410")
    assert off.failing_since is not None and off.position == shown.position
    refused = receiver.messages[-1]
    assert 'kith_event_failures_total{to="webhook"} 0.0' not in operator.metrics()
    assert "are sent again" in run("webhook", "replay", webhook)
    is_eventually(lambda: operator.webhook(webhook).waiting_count == 0)
    told_before = next(message for message in receiver.messages if message.document["type"] == "decision")
    assert [message.id for message in receiver.messages[-2:]] == [told_before.id, refused.id]
    assert [one.off for one in operator.webhooks()] == [False]
    run("webhook", "delete", webhook, status=2)
    assert run("webhook", "delete", webhook, "--yes") == f"Deleted webhook {webhook}\n"
    assert refusal(operator.webhook, webhook) == (404, "webhook_not_found")
    assert {"webhook_created", "webhook_deleted"} <= {line.event for line in operator.audit()}
    for url in ("http://127.0.0.1:1/", guarded.url):
        assert refusal(operator.create_webhook, url) == (422, "webhook_refused")

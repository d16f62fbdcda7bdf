"""Event streams: without loss over every kind of interruption, for entitled keys only, and bounded."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from kith import AsyncKith, Kith, KithClientError
from kith.wire.events import EventOut
from service.operations import event_streams
from service.settings import Settings
from service.storage.repositories import receivers
from service.usecases import events as event_usecase
from tests.conftest import is_eventually
from tests.databases import open_database
from tests.faults.servers import serving
from tests.refusals import check, refusal
from tests.reverse_proxies import nginx
from tests.service.api.conftest import Guarded
from tests.service.cli.conftest import Program

PATIENCE_S = 60


@pytest.fixture
def client(kith: Kith) -> Iterator[Kith]:
    """Client of a server with the galleries "door" and "yard"."""
    for name in ("door", "yard"):
        kith.create_gallery(name, risk={"threshold": 0.9})
    yield kith
    for name in ("door", "yard"):
        kith.delete_gallery(name)


class Following:
    """Stream that a thread reads. ``error``: what ended it."""

    def __init__(self, url: str, key: str | None = None, after: str | None = None, **chosen: Any) -> None:
        self.events: list[EventOut] = []
        self.error: KithClientError | None = None
        self._client = Kith(url, key)
        self.thread = threading.Thread(target=self._read, args=(self._client.events(after, **chosen),), daemon=True)
        self.thread.start()

    def _read(self, events: Iterator[EventOut]) -> None:
        with self._client:
            try:
                self.events.extend(events)
            except KithClientError as error:
                self.error = error

    def wait_for(self, count: int) -> list[EventOut]:
        is_eventually(lambda: len(self.events) >= count)
        return list(self.events)


def identify(kith: Kith, gallery: str, *rows: int) -> None:
    """Report a decision without a subject for each row."""
    dimension = kith.model().dimension
    for row in rows:
        kith.identify(gallery, embeddings=[np.eye(1, dimension, row)[0]])


def position_now(url: str, key: str | None = None) -> str:
    """Return the position of the end of the log."""
    with httpx.stream("GET", f"{url}/v1/events", headers=bearer(key)) as response:
        return next(line for line in response.iter_lines() if line.startswith("id: ")).removeprefix("id: ")


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def take(events: Iterator[EventOut], count: int) -> list[EventOut]:
    return [next(events) for _ in range(count)]


def test_a_stream_resumes_after_the_last_event(client: Kith, server: str, tmp_path: Path) -> None:
    start, dimension = position_now(server), client.model().dimension
    with nginx(server, tmp_path) as proxied:
        strangers = Following(proxied, after=start, types=["decision"], galleries=["door"], outcomes=["unknown"])
        for number in range(3):  # events arrive one by one
            identify(client, "door", number)
            assert len(strangers.wait_for(number + 1)) == number + 1
    first = take(client.events(start), 2)
    identify(client, "yard", 3)
    client.put_subject("yard", "ada", name="Ada")
    client.enroll("yard", "ada", embeddings=[np.eye(1, dimension)[0]])
    rest = take(client.events(first[-1].position), 3)
    found = [*first, *rest]
    assert [(e.type, e.data["gallery"]) for e in found] == [
        *[("decision", "door")] * 3,
        ("decision", "yard"),
        ("enrollment", "yard"),
    ]
    assert len({e.id for e in found}) == 5
    assert {e.data["outcome"] for e in found[:4]} == {"unknown"}
    assert found[4].data["subject"] == "ada"
    assert not any(word in found[0].model_dump_json() for word in ("embedding", "vector", "image"))
    (enrolled,) = take(client.events(start, types=["enrollment"]), 1)
    assert enrolled.id == found[4].id
    risky = take(client.events(start, types=["decision"], min_risk=1), 4)
    assert [e.id for e in risky] == [e.id for e in found[:4]], "decisions without a candidate pass"

    async def follow() -> list[str]:
        async with AsyncKith(server) as kith:
            events = kith.events(start, galleries=["door"])
            return [(await anext(events)).id for _ in range(3)]

    assert asyncio.run(follow()) == [e.id for e in found[:3]]


def test_positions_that_cannot_be_resumed_are_errors(
    client: Kith, server: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = position_now(server)
    identify(client, "door", 0, 1, 2)
    assert len(take(client.events(start), 3)) == 3
    monkeypatch.setattr(receivers, "MAX_KEPT", 1)
    with closing(open_database(settings.sql_url)) as database:
        receivers.ReceiverStore(database).sweep(datetime.now(UTC))
    assert refusal(lambda: next(client.events(start))) == (410, "events_expired")


def test_heartbeats_move_the_position(server: str, client: Kith, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_usecase, "HEARTBEAT_S", 0.05)
    # A browser sends an empty header before the first id.
    with httpx.stream("GET", f"{server}/v1/events?gallery=yard", headers={"Last-Event-ID": ""}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        ids = (line.removeprefix("id: ") for line in response.iter_lines() if line.startswith("id: "))
        first = next(ids)
        identify(client, "door", 0)
        take(client.events(first, galleries=["door"]), 1)
        passed = [next(ids) for _ in range(20)][-1]
    identify(client, "door", 1)
    (event,) = take(client.events(passed), 1)
    assert event.data["gallery"] == "door"
    later = take(client.events(first, galleries=["door"]), 2)
    assert later[-1].id == event.id


def test_streams_are_bounded(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_usecase, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(event_streams, "MAX_STREAMS_PER_KEY", 1)
    url = f"{server}/v1/events"
    for code, status in (("too_many_streams", 429), ("overloaded", 503)):  # an ended stream no longer counts
        with ExitStack() as opened:
            is_eventually(lambda: opened.enter_context(httpx.stream("GET", url)).is_success)
            refused = opened.enter_context(httpx.stream("GET", url))
            assert refused.is_error, "its body has no end"
            refused.read()
            check(refused, status, code)
            assert "retry-after" in refused.headers
        monkeypatch.setattr(event_streams, "MAX_STREAMS_PER_KEY", 9)
        monkeypatch.setattr(event_streams, "MAX_STREAMS", 1)


def test_keys_get_the_events_of_their_galleries_until_they_are_revoked(
    guarded: Guarded, operator: Kith, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_usecase, "HEARTBEAT_S", 0.05)
    for name in ("door", "other"):
        operator.create_gallery(name, risk={"threshold": 0.9})
    some = operator.create_key("some", ["read"], galleries=["door"])
    of_door = Following(guarded.url, some.token, position_now(guarded.url, some.token))
    identify(operator, "other", 0)
    identify(operator, "door", 1)
    assert [e.data["gallery"] for e in of_door.wait_for(1)] == ["door"]
    with Kith(guarded.url, some.token) as reader:
        assert refusal(lambda: next(reader.events(galleries=["other"]))) == (404, "gallery_not_found")
    operator.revoke_key(some.id)
    of_door.thread.join(PATIENCE_S)  # a stream may go on for a heartbeat
    identify(operator, "door", 2)
    assert of_door.error is not None
    assert of_door.error.code == "unauthorized"
    assert len(of_door.events) == 1


@pytest.mark.long
def test_open_streams_do_not_delay_a_stop_and_continue_with_the_next_server(tmp_path: Path) -> None:
    with serving(tmp_path, None) as (process,), process.client() as kith:
        kith.create_gallery("door", risk={"threshold": 0.9})
        following = Following(process.url, after=position_now(process.url))
        identify(kith, "door", 0)
        following.wait_for(1)
        began = time.monotonic()
        process.terminate(PATIENCE_S)
        assert time.monotonic() - began < 8  # uvicorn would wait 10 s for the response
        for count in (2, 3):
            process.launch()
            process.wait_until_ready()
            identify(kith, "door", count)
            assert len({e.id for e in following.wait_for(count)}) == count
            process.kill()
        process.launch()


def test_the_command_prints_a_line_for_each_event(client: Kith, server: str, tmp_path: Path) -> None:
    start, run = position_now(server), Program(tmp_path, server)
    identify(client, "door", 0)
    for words, expected in (((), "decision"), (("--json",), '"outcome": "unknown"')):
        with run.start("events", "--after", start, "-g", "door", *words) as process:
            assert process.stdout is not None
            assert expected in process.stdout.readline()
            process.terminate()

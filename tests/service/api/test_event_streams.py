"""Event streams: without loss over every kind of interruption, for entitled keys only, and bounded."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from kith import AsyncKith, Kith, KithClientError
from kith.wire.events import EventOut
from service.core.clock import Clock
from service.operations import event_streams
from service.server import embedded
from service.settings import load_settings
from service.storage.repositories import receivers
from service.usecases import events as event_usecase
from tests.commands import run_kith
from tests.conftest import ROOT
from tests.databases import open_database
from tests.faults.servers import free_port
from tests.reverse_proxies import nginx

PATIENCE_S = 60


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams")


@pytest.fixture(scope="module")
def place(data_dir: Path) -> Iterator[str]:
    settings = load_settings(data_dir=data_dir, log_level="ERROR")
    with embedded(settings) as url:
        yield url


@pytest.fixture
def client(place: str) -> Iterator[Kith]:
    with Kith(place) as kith:
        for name in ("door", "yard"):
            kith.create_gallery(name, risk={"threshold": 0.9})
        yield kith
        for gallery in list(kith.galleries()):
            kith.delete_gallery(gallery.name)


class Following:
    """Stream that a thread reads. ``error``: what ended it."""

    def __init__(self, url: str, key: str | None = None, after: str | None = None, **chosen: Any) -> None:
        self.events: list[EventOut] = []
        self.error: KithClientError | None = None
        self._client = Kith(url, key)
        self._stream = self._client.events(after, **chosen)
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for event in self._stream:
                with self._changed:
                    self.events.append(event)
                    self._changed.notify()
        except KithClientError as error:
            self.error = error
        finally:
            self._client.close()

    def wait_for(self, count: int) -> list[EventOut]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, PATIENCE_S), f"{len(self.events)} events"
            return list(self.events)


def identify(kith: Kith, gallery: str, *rows: int) -> None:
    """Report a decision about nobody for each row."""
    dimension = kith.model().dimension
    for row in rows:
        kith.identify(gallery, embeddings=[np.eye(1, dimension, row)[0]])


def position_now(url: str, key: str | None = None) -> str:
    """Return the position of the end of the log."""
    with httpx.stream("GET", f"{url}/v1/events", headers=bearer(key)) as response:
        return next(line for line in response.iter_lines() if line.startswith("id: ")).removeprefix("id: ")


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def take(events: Iterator[EventOut], count: int) -> list[EventOut]:
    return [next(events) for _ in range(count)]


def test_a_stream_resumes_after_the_last_event(client: Kith, place: str) -> None:
    start = position_now(place)
    identify(client, "door", 0, 1, 2)
    first = take(client.events(start), 2)
    identify(client, "yard", 3)
    client.put_subject("yard", "ada", name="Ada")
    client.enroll("yard", "ada", embeddings=[np.eye(1, client.model().dimension)[0]])
    rest = take(client.events(first[-1].position), 3)
    found = [*first, *rest]
    assert [(e.type, e.data["gallery"]) for e in found] == [
        *[("decision", "door")] * 3,
        ("decision", "yard"),
        ("enrollment", "yard"),
    ]
    assert len({e.id for e in found}) == 5
    assert {e.data["outcome"] for e in found[:4]} == {"unknown"}
    assert not any(word in found[0].model_dump_json() for word in ("embedding", "vector", "image"))


def test_events_arrive_while_the_stream_is_open(client: Kith, place: str) -> None:
    start = position_now(place)
    strangers = Following(place, after=start, types=["decision"], galleries=["door"], outcomes=["unknown"])
    enrolled = Following(place, after=start, types=["enrollment"])
    risky = Following(place, after=start, types=["decision"], min_risk=1)
    for number in range(3):
        identify(client, "door", number)
        assert len(strangers.wait_for(number + 1)) == number + 1
    client.enroll("door", "ada", embeddings=[np.eye(1, client.model().dimension)[0]])
    identify(client, "yard", 0)
    assert [e.data["subject"] for e in enrolled.wait_for(1)] == ["ada"]
    assert len(strangers.events) == 3
    assert {e.type for e in risky.wait_for(4)} == {"decision"}  # decisions without a candidate pass


def test_the_asynchronous_client_follows_too(client: Kith, place: str) -> None:
    start = position_now(place)
    identify(client, "door", 0, 1)

    async def follow() -> list[str]:
        async with AsyncKith(place) as kith:
            found = []
            async for event in kith.events(start, galleries=["door"]):
                found.append(event.data["outcome"])
                if len(found) == 2:
                    return found
        raise AssertionError("the stream ended")

    assert asyncio.run(follow()) == ["unknown"] * 2


def test_positions_that_cannot_be_resumed_are_errors(
    client: Kith, place: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ("1", "ab" * 40, "x" * 80):
        answer = httpx.get(f"{place}/v1/events", headers={"Last-Event-ID": wrong})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    start = position_now(place)
    identify(client, "door", 0, 1, 2)
    assert len(take(client.events(start), 3)) == 3
    monkeypatch.setattr(receivers, "MAX_KEPT", 1)
    database = open_database(f"sqlite:///{data_dir / 'kith.db'}")
    receivers.ReceiverStore(database).sweep(Clock())
    database.close()
    with pytest.raises(KithClientError, match="events_expired") as raised:
        next(client.events(start))
    assert raised.value.status == 410


def test_heartbeats_move_the_position(place: str, client: Kith, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_usecase, "HEARTBEAT_S", 0.05)
    with httpx.stream("GET", f"{place}/v1/events?gallery=yard") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        lines = response.iter_lines()
        ids = [next(lines) for _ in range(3)]
        identify(client, "door", 0)
        take(client.events(ids[0].removeprefix("id: "), galleries=["door"]), 1)
        *_, passed = [line for line in (next(lines) for _ in range(60)) if line.startswith("id: ")]
    assert ids[0].startswith("id: ")
    identify(client, "door", 1)
    (event,) = take(client.events(passed.removeprefix("id: ")), 1)
    assert event.data["gallery"] == "door"
    later = take(client.events(ids[0].removeprefix("id: "), galleries=["door"]), 2)
    assert later[-1].id == event.id


def test_streams_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_usecase, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(event_streams, "MAX_STREAMS_PER_KEY", 1)
    with embedded(load_settings(data_dir=tmp_path, log_level="ERROR")) as url:
        with httpx.stream("GET", f"{url}/v1/events") as response:
            assert response.is_success
            refused = httpx.get(f"{url}/v1/events")
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
            assert "retry-after" in refused.headers
            monkeypatch.setattr(event_streams, "MAX_STREAMS_PER_KEY", 9)
            monkeypatch.setattr(event_streams, "MAX_STREAMS", 1)
            refused = httpx.get(f"{url}/v1/events")
            assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        until(lambda: is_admitted(url))  # the ended stream no longer counts


def is_admitted(url: str) -> bool:
    with httpx.stream("GET", f"{url}/v1/events") as response:
        return response.is_success


def test_keys_get_the_events_of_their_galleries_until_they_are_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_usecase, "HEARTBEAT_S", 0.05)
    with embedded(load_settings(data_dir=tmp_path, log_level="ERROR")) as url, Kith(url) as anonymous:
        admin = anonymous.create_key("admin", ["admin"]).token
        with Kith(url, admin) as kith:
            for name in ("door", "yard"):
                kith.create_gallery(name, risk={"threshold": 0.9})
            some = kith.create_key("some", ["read"], galleries=["door"])
            start = position_now(url, some.token)
            of_door = Following(url, some.token, start)
            identify(kith, "yard", 0)
            identify(kith, "door", 1)
            assert [e.data["gallery"] for e in of_door.wait_for(1)] == ["door"]
            with Kith(url, some.token) as reader, pytest.raises(KithClientError, match="gallery_not_found"):
                next(reader.events(galleries=["yard"]))
            with (
                Kith(url, kith.create_key("finder", ["identify"]).token) as finder,
                pytest.raises(KithClientError, match="forbidden"),
            ):
                next(finder.events())
            kith.revoke_key(some.id)
            identify(kith, "door", 2)
            of_door.thread.join(PATIENCE_S)
            assert of_door.error is not None
            assert of_door.error.code == "unauthorized"
            assert len(of_door.events) == 1


@pytest.mark.long
def test_open_streams_do_not_delay_a_stop_and_continue_with_the_next_server(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, log_level="ERROR")
    port = free_port()
    command = [sys.executable, "-m", "service.cli.entry", "serve", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    environment = {"KITH_DATA_DIR": str(settings.data_dir), "KITH_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}

    def started() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path)
        until(lambda: is_ready(url))
        return process

    first = started()
    with Kith(url) as kith:
        kith.create_gallery("door", risk={"threshold": 0.9})
        following = Following(url, after=position_now(url))
        identify(kith, "door", 0)
        following.wait_for(1)
        began = time.monotonic()
        first.terminate()
        first.wait(PATIENCE_S)
        assert time.monotonic() - began < 8  # uvicorn would wait 10 s for the response
        second = started()
        try:
            identify(kith, "door", 1)
            assert len(following.wait_for(2)) == 2
            second.kill()
            second.wait(PATIENCE_S)
            second = started()
            identify(kith, "door", 2)
            assert len({e.id for e in following.wait_for(3)}) == 3
        finally:
            second.kill()
            second.wait(PATIENCE_S)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").is_success
    except httpx.TransportError:
        return False


def test_events_pass_nginx_one_by_one(client: Kith, place: str, tmp_path: Path) -> None:
    with nginx(place, tmp_path) as url:
        following = Following(url, after=position_now(url), galleries=["door"])
        for number in range(3):
            identify(client, "door", number)
            following.wait_for(number + 1)


def test_the_command_prints_a_line_for_each_event(client: Kith, place: str, tmp_path: Path) -> None:
    start = position_now(place)
    identify(client, "door", 0, 1)
    for words, read in (([], str.split), (["--json"], json.loads)):
        command = [sys.executable, "-m", "service.cli.entry", "events", "--after", start, "-g", "door", *words]
        environment = {"KITH_URL": place, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = read(process.stdout.readline())
        assert (line["data"]["outcome"] if isinstance(line, dict) else line[2:5]) in (
            "unknown",
            ["decision", "door", "outcome=unknown"],
        )
        process.terminate()
        process.wait(PATIENCE_S)
        process.stdout.close()
    refused = run_kith("events", "--type", "nothing", cwd=tmp_path, environment={"KITH_URL": place})
    assert (refused.returncode, "type" in refused.stderr) == (3, True)

"""Deadlines and disconnects of photo requests, over real sockets."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from models.vision.detection import Detector, PreparedPhoto, RawOutputs
from service import wiring
from service.api.http import gate
from service.inference.images import PhotoDecoder, PhotoHeader
from service.server import embedded
from service.settings import load_settings
from tests.conftest import is_eventually, jpeg
from tests.refusals import check

read_header = PhotoDecoder.read_header


@contextmanager
def held_detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Detectors that block until released, like one on a busy device."""
    gate = threading.Event()

    class Held(Detector):
        def run(self, canvases: Sequence[PreparedPhoto]) -> list[RawOutputs]:
            assert gate.wait(60)
            return super().run(canvases)

    monkeypatch.setattr(wiring, "Detector", Held)
    try:
        yield gate.set
    finally:
        gate.set()


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_disconnect_cancels_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8], caplog: pytest.LogCaptureFixture
) -> None:
    photo = jpeg(astronaut)
    head = f"POST /v1/embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\nContent-Length: {len(photo)}\r\n"
    request = f"{head}\r\n".encode() + photo
    waiting = 'kith_queue_items{lane="requests"'
    monkeypatch.setattr(gate, "BODY_PATIENCE_S", 1)  # for bodies only: the watch for a disconnect goes on
    with (
        held_detector(monkeypatch) as release,
        embedded(load_settings(data_dir=tmp_path, threads=1, log_level="WARNING")) as url,
        Kith(url) as kith,
        caplog.at_level(logging.INFO, "service.access"),
    ):
        address = url.removeprefix("http://").split(":")
        clients = [socket.create_connection((address[0], int(address[1]))) for _ in range(3)]
        clients[0].sendall(request)
        is_eventually(lambda: metric(url, "kith_queue_items") == 0 and metric(url, waiting) == 0)
        for client in clients[1:]:
            client.sendall(request)
        is_eventually(lambda: metric(url, "kith_queue_items") == 2)
        threading.Event().wait(1.5)
        clients[1].close()
        is_eventually(lambda: metric(url, "kith_queue_items") == 1)
        assert metric(url, 'kith_dropped_total{network="detector/kith-compact",reason="client_gone"}') == 1
        release()
        assert clients[2].recv(12) == b"HTTP/1.1 200"
        assert metric(url, 'kith_batch_items_sum{network="detector/kith-compact"}') == 2
        assert len(kith.embed(photo).images[0].faces) > 0
        for client in clients:
            client.close()
    assert [record.args[3] for record in caplog.records if record.name == "service.access"].count(499) == 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "kind", "begun"),
    [
        ("/v1/embed", "image/jpeg", ""),
        ("/v1/embed", "multipart/form-data; boundary=b", "--b\r\nCont"),
        ("/v1/galleries", "application/json", "{"),
        ("/v1/galleries/g/import", "application/x-ndjson", "{"),
    ],
)
def test_a_disconnect_during_the_body_is_not_an_error(
    server: str, kind: str, path: str, begun: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = httpx.URL(server)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 1000\r\n\r\n{begun}"

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "service.access"]

    with caplog.at_level(logging.INFO):
        with socket.create_connection((url.host, url.port or 80)) as connection:
            connection.sendall(head.encode())
            threading.Event().wait(0.1)
        is_eventually(lambda: len(lines()) == 1)
    (line,) = lines()
    assert isinstance(line.args, tuple) and line.args[3] == 499
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_deadline_is_the_requests_or_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8]
) -> None:
    def ask(url: str, milliseconds: str | None) -> httpx.Response:
        headers = {} if milliseconds is None else {"X-Request-Timeout-Ms": milliseconds}
        return httpx.post(f"{url}/v1/detect", files={"images": jpeg(astronaut)}, headers=headers, timeout=30)

    settings = load_settings(data_dir=tmp_path, threads=1, log_level="WARNING", deadline_s=100)
    with held_detector(monkeypatch) as release, embedded(settings) as url:
        for milliseconds in ("1", "50", "000000000000050"):
            check(ask(url, milliseconds), 504, "deadline_exceeded")
        release()
        assert ask(url, "9" * 4000).json()["images"][0]["faces"]
    short = settings.model_copy(update={"deadline_s": 0.3})
    with held_detector(monkeypatch) as release, embedded(short) as url:
        for most in (None, "99999999999999"):
            check(ask(url, most), 504, "deadline_exceeded")
        release()


def test_photos_are_not_decoded_if_the_queue_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8]
) -> None:
    decoded: list[bytes] = []

    def counting(decoder: PhotoDecoder, payload: bytes) -> PhotoHeader:
        decoded.append(payload)
        return read_header(decoder, payload)

    monkeypatch.setattr(PhotoDecoder, "read_header", counting)
    monkeypatch.setattr(wiring, "QUEUE_SIZE", 2)
    settings = load_settings(data_dir=tmp_path, threads=1, log_level="WARNING", max_images=2)
    with held_detector(monkeypatch) as release, embedded(settings) as url, ThreadPoolExecutor(7) as pool:

        def ask() -> Future[httpx.Response]:
            return pool.submit(httpx.post, f"{url}/v1/detect", files={"images": jpeg(astronaut)}, timeout=60)

        first = ask()
        is_eventually(lambda: len(decoded) == 1 and metric(url, "kith_queue_items") == 0)
        more = [ask() for _ in range(6)]
        is_eventually(lambda: sum(each.done() for each in more) >= 4)
        assert len(decoded) <= 3
        for refused in [each.result() for each in more if each.done()]:
            check(refused, 503, "overloaded")
            assert int(refused.headers["Retry-After"]) >= 1
        release()
        assert [each.result().status_code for each in (first, *more)].count(200) == 3

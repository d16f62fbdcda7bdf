"""Answers on a kept-alive connection leave at once.

uvicorn writes head and body apart. Without TCP_NODELAY the kernel holds the body back until the client acknowledges the
head, and clients delay acknowledgments by 40 ms.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from service.core.errors import SettingsError
from service.server import bind, bind_all, embedded
from service.settings import load_settings

ANSWERS = 40
DELAYED_ACK_S = 0.04


def usual_time_s(address: str) -> float:
    """Return the first quartile of the answers' times on one kept-alive connection to ``HOST:PORT``.

    With the delay, nearly every answer takes 40 ms; a busy machine slows some answers.
    """
    connection = http.client.HTTPConnection(address)
    times_s = []
    for _ in range(ANSWERS):
        begin = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        times_s.append(time.perf_counter() - begin)
    connection.close()
    return sorted(times_s)[ANSWERS // 4]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_accepted_connections_send_without_delay(host: str) -> None:
    try:
        listener = bind(host, 0)
    except SettingsError:
        assert host == "::1", "only IPv6 may be missing"
        pytest.skip("this machine has no IPv6")
    with listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_all_addresses_include_those_of_ipv4() -> None:
    try:
        listeners = bind_all("::", 0)
    except SettingsError:
        pytest.skip("this machine has no IPv6")
    port = listeners[0].getsockname()[1]
    for listener, host in zip(listeners, ("::1", "127.0.0.1"), strict=True):
        with listener, socket.create_connection((host, port)):
            accepted, client = listener.accept()
            accepted.close()
            assert client[0] == host


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("kept-alive")
    with embedded(load_settings(data_dir=folder, log_level="ERROR")) as url:
        yield urlsplit(url).netloc


def test_later_answers_of_a_connection_do_not_wait_for_the_client(address: str) -> None:
    assert usual_time_s(address) < DELAYED_ACK_S / 2

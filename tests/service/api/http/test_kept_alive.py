"""Answers on a kept-alive connection leave at once.

uvicorn writes head and body apart. Without TCP_NODELAY the kernel holds the body back until the client acknowledges the
head, and clients delay acknowledgments by 40 ms.
"""

from __future__ import annotations

import http.client
import socket
import time
from urllib.parse import urlsplit

from service.core.errors import SettingsError
from service.server import bind, bind_all

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


def test_all_addresses_include_those_of_ipv4_and_send_without_delay() -> None:
    try:
        listeners = bind_all("::", 0)
    except SettingsError:
        listeners = [bind("127.0.0.1", 0)]  # this machine has no IPv6
    port = listeners[0].getsockname()[1]
    for listener, host in zip(listeners[::-1], ("127.0.0.1", "::1"), strict=False):
        with listener, socket.create_connection((host, port)):
            accepted, client = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert client[0] == host


def test_later_answers_of_a_connection_do_not_wait_for_the_client(server: str) -> None:
    assert usual_time_s(urlsplit(server).netloc) < DELAYED_ACK_S / 2

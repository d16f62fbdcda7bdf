"""What the HTTP server refuses, and that slow or endless requests block no other request and fill no memory.

Raw sockets against real servers.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import service.server
from service.api.http import gate
from service.core.errors import SettingsError
from service.server import bind, bind_all, embedded
from service.settings import load_settings
from tests.conftest import is_eventually

HOST = b"Host: localhost\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\n" + HOST
LAST = HEALTH + b"Connection: close\r\n\r\n"
POST = b"POST /v1/verify HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
PATIENCE_S = 0.2


@pytest.fixture
def port(server: str) -> int:
    return int(server.rpartition(":")[2])


@pytest.fixture
def impatient(port: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Port of the server, which waits a short time for bodies."""
    monkeypatch.setattr(gate, "BODY_PATIENCE_S", PATIENCE_S)
    return port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def read(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def status(port: int, sent: bytes) -> int:
    """Return the status of the first answer."""
    with connect(port) as connection:
        with suppress(ConnectionError):  # refused while it is sent
            connection.sendall(sent)
        return int(connection.recv(12).split()[1])


def answered(port: int, sent: bytes) -> list[int]:
    """Return the status of each answer until the server closes."""
    with connect(port) as connection:
        connection.sendall(sent)
        return [int(rest[:3]) for rest in read(connection).split(b"HTTP/1.1 ")[1:]]


REFUSED = {
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "endless trailers": CHUNKED + b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 500_000,
}
"""One of each kind, as a sign that the strict parser (h11) serves."""


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_and_endless_requests_are_refused(port: int, case: str) -> None:
    assert status(port, REFUSED[case]) == 400


def test_unusual_paths_open_nothing(port: int) -> None:
    for path, code in (
        (b"/v1/galleries/%2e%2e", 422),
        (b"/v1/galleries/..%2f..%2fetc%2fpasswd", 404),
        (b"/v1/galleries/../../etc/passwd", 404),
        (b"/console/..%2Fv1/galleries", 404),
        (b"/console/../../settings.py", 404),
        (b"/console/%2e%2e/settings.py", 404),
        (b"/console//etc/passwd", 404),
        (b"/console/pages/", 404),
        (b"//healthz", 404),
        (b"*", 404),
    ):
        assert answered(port, b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n") == [code]


@pytest.mark.parametrize(
    "begun", [POST + b"Content-Length: 9\r\n\r\n{", CHUNKED + b"1\r\n{\r\n"], ids=["length", "chunks"]
)
def test_a_body_that_stalls_ends(impatient: int, begun: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(begun)
        head, _, body = read(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["code"] == "client_too_slow"


def test_a_slow_upload_arrives_and_blocks_nobody(impatient: int) -> None:
    body = b'{"a": ' + b" " * 10 + b"}"
    with connect(impatient) as slow:
        slow.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        begin = time.monotonic()
        for byte in body:
            slow.sendall(bytes([byte]))
            assert status(impatient, HEALTH + b"\r\n") == 200
            time.sleep(PATIENCE_S / 4)
        assert time.monotonic() - begin > 2 * PATIENCE_S
        answer = read(slow)
    assert answer.startswith(b"HTTP/1.1 422") and b"client_too_slow" not in answer


def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed connection frees its place."""
    monkeypatch.setattr(service.server, "MAX_CONNECTIONS", 8)
    with embedded(load_settings(data_dir=tmp_path, log_level="ERROR")) as url, ExitStack() as opened:
        port = int(url.rpartition(":")[2])
        held = [opened.enter_context(connect(port)) for _ in range(7)]
        for connection in held:
            connection.sendall(HEALTH + b"\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert answered(port, LAST) == [503]
        held[0].close()
        is_eventually(lambda: answered(port, LAST) == [200])  # the server notices the close


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

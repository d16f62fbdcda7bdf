"""Limits on connections: endless heads, slow clients, floods and ambiguous requests.

Raw sockets against real servers with low limits.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from service.server import embedded
from service.settings import load_settings
from tests.faults.servers import Server

HOST = b"Host: localhost\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\n" + HOST
LAST = HEALTH + b"Connection: close\r\n\r\n"
POST = b"POST /v1/verify HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
PATIENCE_S = 0.4


@contextmanager
def limited_server(folder: Path, patience_s: float) -> Iterator[int]:
    """Port of a server that accepts few connections."""
    settings = load_settings(
        data_dir=folder,
        client_patience_s=patience_s,
        client_min_rate=1_000_000,
        max_connections=12,
        max_connections_per_address=8,
        log_level="ERROR",
    )
    with embedded(settings) as url:
        yield int(url.rpartition(":")[2])


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a server that does not time out during a test."""
    with limited_server(tmp_path_factory.mktemp("patient"), 60) as port:
        yield port


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a server with a short timeout."""
    with limited_server(tmp_path_factory.mktemp("impatient"), PATIENCE_S) as port:
        yield port


def connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))


def read(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def answers(port: int, *pieces: bytes) -> list[tuple[int, dict[str, object]]]:
    """Send, and return status and document of each response until the server closes."""
    with connect(port) as connection:
        for piece in pieces:
            connection.sendall(piece)
        left, found = read(connection), []
    while left:
        head, _, rest = left.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
        found.append((int(lines[0].split()[1]), json.loads(rest[:length])))
        left = rest[length:]
    return found


AMBIGUOUS = {
    "both lengths": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + LAST,
    "both lengths, the other way round": POST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n"
    + LAST,
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a length with a sign": POST + b"Content-Length: +2\r\n\r\n{}",
    "a negative length": POST + b"Content-Length: -2\r\n\r\n{}",
    "a hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "a length of 24 digits": POST + b"Content-Length: 999999999999999999999999\r\n\r\n{}",
    "a length in other digits": POST + b"Content-Length: \xb2\r\n\r\n{}",
    "chunked, then something else": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a chunk of letters": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "a chunk of 17 digits": CHUNKED + b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "a negative chunk": CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    "a chunk that is longer than it says": CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
    "chunks without CR": CHUNKED + b"2\n{}\n0\n\n",
    "lines without CR": b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "a folded header": HEALTH + b"A: b\r\n c\r\n\r\n",
    "a NUL in a header": HEALTH + b"A: b\0c\r\n\r\n",
    "a bare CR in a header": HEALTH + b"A: b\rc\r\n\r\n",
    "a header without name": HEALTH + b": c\r\n\r\n",
    "no Host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two Hosts": HEALTH + HOST + b"\r\n",
    "two Hosts in HTTP/1.0": b"GET /healthz HTTP/1.0\r\n" + HOST + HOST + b"\r\n",
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2 by number": b"GET /healthz HTTP/2.0\r\n" + HOST + b"\r\n",
    "an unknown method": b"FROB /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tunnel": b"CONNECT x:443 HTTP/1.1\r\n" + HOST + b"\r\n",
    "no path": b"GET http://elsewhere HTTP/1.1\r\n" + HOST + b"\r\n",
    "a NUL in the path": b"GET /health\0z HTTP/1.1\r\n" + HOST + b"\r\n",
    "eight bits in the path": b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 500,
    "a body that would be the next request": POST
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(LAST)
    + LAST,
    "megabytes about a chunk": CHUNKED + b"2;" + b"x" * 1_000_000 + b"\r\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_ambiguous_requests_are_rejected(port: int, case: str) -> None:
    ((status, document),) = answers(port, AMBIGUOUS[case])
    assert (status, document["code"]) == (400, "malformed_http")
    assert "no Upgrade" in str(document["remedy"])


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 32_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /healthz?" + b"a" * 5_000_000,
        HEALTH + b"A: b\r\n" * 100 + b"\r\n",
        HEALTH + b"A: " + b"b" * 31_990 + b"\r\n\r\n",
        HEALTH + b"A: " + b"b" * 5_000_000,
        HEALTH + b"b" * 5_000_000,
        CHUNKED + b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 100_000 + b"\r\n",
    ],
    ids=["address", "endless query", "headers", "header", "endless header", "endless name", "trailers"],
)
def test_a_head_has_a_maximum_length(port: int, head: bytes) -> None:
    ((status, document),) = answers(port, head)
    assert (status, document["code"]) == (431, "head_too_large")


@pytest.mark.parametrize(
    "request_",
    [
        LAST,
        b"GET /healthz HTTP/1.0\r\n\r\n",
        b"GET http://elsewhere/healthz HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n",
        HEALTH + b"A: b\r\n" * 97 + b"Connection: close\r\n\r\n",
        HEALTH + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n" + LAST,
        (HEALTH + b"\r\n") * 9 + LAST,
    ],
    ids=["plain", "HTTP/1.0", "absolute", "many headers", "websocket", "pipelined"],
)
def test_unusual_valid_requests_are_answered(port: int, request_: bytes) -> None:
    found = answers(port, request_)
    assert len(found) == request_.count(b"GET ")
    assert {status for status, _ in found} == {200}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (b"/v1/galleries/a%00b", 422),
        (b"/v1/galleries/%ff%fe", 400),
        (b"/v1/galleries/%zz%", 422),
        (b"/v1/galleries/%2e%2e", 400),
        (b"/v1/galleries/..%2f..%2fetc%2fpasswd", 400),
        (b"/v1/galleries/../../etc/passwd", 400),
        (b"/v1/galleries/g/subjects/..", 400),
        (b"/v1/galleries/g/subjects/.", 400),
        (b"/v1/galleries/g/subjects/%2E.", 400),
        (b"/v1/galleries/g/subjects/.%2e?limit=1", 400),
        (b"/v1/galleries/./g", 400),
        (b"/v1/galleries/g%2Fsubjects%2Fp1", 400),
        (b"/v1/galleries/g%5csubjects", 400),
        (b"/v1/galleries/g\\subjects", 400),
        (b"/console/..%2Fv1/galleries", 400),
        (b"http://kith/v1/galleries/%2E%2E", 400),
        (b"/healthz?to=../%2F%2e%2e", 200),
        (b"/v1/galleries/g/subjects/...", 404),
        (b"/v1/galleries/g/subjects/%252e%252e", 404),
        (b"/v1/galleries/g/subjects/%252F", 404),
        (b"//healthz", 404),
        (b"/healthz;x", 404),
        (b"*", 404),
    ],
)
def test_ambiguous_paths_are_rejected(port: int, path: bytes, status: int) -> None:
    ((found, _),) = answers(port, b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
    assert found == status


def test_a_host_header_causes_no_redirect(port: int) -> None:
    ((status, _),) = answers(
        port, b"GET /v1/galleries/ HTTP/1.1\r\nHost: elsewhere.example\r\nConnection: close\r\n\r\n"
    )
    assert status == 403  # rejected, not redirected to that host


def test_accepted_pipelined_requests_are_answered_before_a_rejection(port: int) -> None:
    found = answers(port, (HEALTH + b"\r\n") * 5000)
    assert 1 <= len(found) <= 20
    assert {status for status, _ in found} == {200}


def test_garbage_after_a_request_does_not_affect_its_response(port: int) -> None:
    assert [status for status, _ in answers(port, HEALTH + b"\r\n\0\1garbage")] == [200]


@pytest.mark.parametrize(
    "begun",
    [b"GET /heal", HEALTH + b"A: b\r\n", POST + b"Content-Length: 9\r\n\r\n{", CHUNKED + b"1\r\n{\r\n"],
    ids=["address", "headers", "body", "chunks"],
)
def test_an_incomplete_request_times_out(impatient: int, begun: bytes) -> None:
    ((status, document),) = answers(impatient, begun)
    assert (status, document["code"]) == (408, "client_too_slow")


def test_an_idle_connection_is_closed(impatient: int) -> None:
    assert answers(impatient, b"") == []
    with connect(impatient) as connection:
        connection.sendall(HEALTH + b"\r\n")
        received = b"".join(iter(lambda: connection.recv(65536), b""))  # until the end, in any number of chunks
        assert received.startswith(b"HTTP/1.1 200")


def test_a_slow_body_times_out(impatient: int) -> None:
    with connect(impatient) as connection:
        connection.sendall(CHUNKED)
        connection.settimeout(PATIENCE_S / 10)
        for _ in range(1000):
            try:
                connection.sendall(b"1\r\n \r\n")
                answer = connection.recv(65536)
            except TimeoutError:
                continue
            break
        assert answer.startswith(b"HTTP/1.1 408")


def test_input_after_the_response_is_discarded_up_to_a_limit(port: int) -> None:
    """The response stays readable while further input arrives."""
    with connect(port) as connection:
        connection.sendall(POST + b"Content-Length: 900000000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(1000):
                connection.sendall(b"x" * 1_000_000)


def test_a_client_that_does_not_read_is_disconnected(impatient: int) -> None:
    with connect(impatient) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asked = b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n"
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(1_000_000):
                connection.sendall(asked)


def test_connections_are_bounded(port: int) -> None:
    """Limits per address and in total. A closed connection frees its place."""
    with ExitStack() as opened:
        for source in ("127.0.0.1", "127.0.0.2"):
            held = []
            for _ in range(8 if source == "127.0.0.1" else 4):
                held.append(opened.enter_context(connect(port, source)))
                held[-1].sendall(HEALTH + b"\r\n")
                assert held[-1].recv(65536).startswith(b"HTTP/1.1 200")
            with connect(port, source) as refused:
                answer = read(refused)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"too_many_connections" in answer
            assert b"retry-after" in answer
        held[0].close()
        for _ in range(100):  # until the server notices the close
            with connect(port, "127.0.0.3") as another:
                another.sendall(LAST)
                try:
                    answer = read(another)
                except ConnectionResetError:
                    continue
            if answer.startswith(b"HTTP/1.1 200"):
                return
        raise AssertionError("no connection was let in")


def test_refused_connections_are_paced(port: int) -> None:
    """A client that reconnects at once gets each 503 after a delay of a second."""
    with ExitStack() as opened:
        for _ in range(8):
            opened.enter_context(connect(port)).sendall(HEALTH)
        begin = time.monotonic()
        refused = []
        for _ in range(2):
            with connect(port) as connection:
                refused.append(read(connection))
        waited_s = time.monotonic() - begin
    assert [b"too_many_connections" in answer for answer in refused] == [True] * 2
    assert waited_s > 1.5


def test_memory_stays_flat(tmp_path: Path) -> None:
    """Peak memory, while eight open connections send megabytes of each attack."""
    server = Server(tmp_path, OMP_NUM_THREADS="1")
    try:
        server.wait_until_ready()
        port = int(server.url.rpartition(":")[2])
        before = server.peak_bytes()
        for sent in (
            HEALTH + b"A: b\r\n" * 300_000,
            HEALTH + b"A: " + b"b" * 4_000_000,
            CHUNKED + b"0\r\n" + b"A: b\r\n" * 300_000,
            CHUNKED + b"2;" + b"x" * 4_000_000,
            (HEALTH + b"\r\n") * 20_000,
        ):
            with ExitStack() as opened:
                for _ in range(8):
                    connection = opened.enter_context(connect(port))
                    with suppress(ConnectionError):  # rejected while sending
                        connection.sendall(sent)
                assert server.readiness() == 200
        assert server.peak_bytes() - before < 50_000_000
    finally:
        server.kill()

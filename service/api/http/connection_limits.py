"""Limits on HTTP connections, enforced in a subclass of uvicorn's protocol.

uvicorn and httptools limit neither the length of a head, pipelined requests, the framing around a chunked body, nor the
time that a client takes (docs/decisions/0041). A request beyond a limit gets a problem document and the connection is
closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.core.errors import (
    ClientTooSlowError,
    HeadTooLargeError,
    KithError,
    MalformedHttpError,
    TooManyConnectionsError,
)
from service.security.addresses import owner_of

MAX_HEADERS: Final = 100
MAX_PIPELINED: Final = 16
MAX_FRAMING_RATIO: Final = 8
"""Bytes of chunk framing allowed per byte of the body: a chunk of one byte has five."""
LENGTH_HEADERS: Final = (b"content-length", b"transfer-encoding")
MAX_LINGER_BYTES: Final = 10_000_000
"""Bytes that are read and discarded after a response. Closing at once would reset the connection and lose it."""
LOG_INTERVAL_S: Final = 10.0
MAX_DELAYED: Final = 250
"""Maximum number of refused connections whose 503 is delayed, by a second at most.

The delay slows down clients that reconnect at once. Further connections are refused without delay, which bounds the
number of open descriptors.
"""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpLimits:
    """Limits of a server.

    ``max_connections_per_address``: for IPv6 per /64 network. ``patience_s``: for a head; a body, and the reading of a
    response, get this and the time that ``min_rate`` (bytes per second) gives them.
    """

    max_connections: int
    max_connections_per_address: int
    max_head_bytes: int
    patience_s: float
    min_rate: int


def create_protocol(limits: HttpLimits, on_refusal: Callable[[str], None]) -> type[asyncio.Protocol]:
    """Return the protocol class of one server. ``on_refusal`` gets the error code of each refusal."""
    server = _ServerState(on_refusal)

    class Protocol(_LimitedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(limits, server, *args, **kwargs)

    return Protocol


class _ServerState:
    """State that the connections of one server share."""

    def __init__(self, on_refusal: Callable[[str], None]) -> None:
        self.by_address: Counter[str] = Counter()
        self.delayed = 0
        self.on_refusal = on_refusal
        self._logged_s = -LOG_INTERVAL_S

    def log_refusal(self, detail: str, now_s: float) -> None:
        """Log at most once per interval, so that a flood does not fill the log."""
        if now_s >= self._logged_s + LOG_INTERVAL_S:
            self._logged_s = now_s
            log.warning("connections are refused: %s", detail)


class _LimitedProtocol(HttpToolsProtocol):
    """Connection with limits.

    One periodic timer per connection checks for slow clients. Time counts only while the server waits for the client,
    not while it processes a request or applies backpressure.
    """

    def __init__(self, limits: HttpLimits, server: _ServerState, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._server = server
        self._check_interval_s = min(1.0, limits.patience_s / 4)
        self._timer: asyncio.TimerHandle | None = None
        self._parse_error: KithError | None = None
        self._delayed_refusal: TooManyConnectionsError | None = None
        self._is_counted = False
        self._in_head = self._in_body = self._discarding = False
        self._waited_s = self._unread_s = 0.0
        self._head_bytes = self._host_headers = self._body_bytes = 0
        self._framing_bytes = self._discarded_bytes = self._unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._check_interval_s, self._check_progress)
        self._address = owner_of(self.client[0] if self.client else "")
        self._server.by_address[self._address] += 1
        self._is_counted = True
        limits = self._limits
        if len(self.connections) > limits.max_connections:
            self._refuse_connection(f"{limits.max_connections} connections are open, the limit")
        elif self._server.by_address[self._address] > limits.max_connections_per_address:
            self._refuse_connection(f"{limits.max_connections_per_address} connections are open from this address")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._server.delayed -= self._delayed_refusal is not None
        self._delayed_refusal = None
        self._uncount()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _uncount(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._server.by_address[self._address] -= 1
            if not self._server.by_address[self._address]:
                del self._server.by_address[self._address]

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._discarding:
            self._discard(len(data))
            return
        self._framing_bytes += len(data)
        remaining = memoryview(data)
        while remaining:
            try:
                self.parser.feed_data(remaining)
                break
            except httptools.HttpParserUpgrade as upgrade:
                # A server may ignore an upgrade; the request is then an ordinary one (RFC 9110, 7.8).
                remaining = remaining[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse(self._parse_error or MalformedHttpError(f"this is not HTTP/1.1: {error}"))
                return
        if self._framing_bytes > self._limits.max_head_bytes:
            self._refuse(
                MalformedHttpError("the chunk framing is far larger than the chunks")
                if self._in_body
                else self._head_too_large()
            )

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parsing(MalformedHttpError(f"more than {MAX_PIPELINED} pipelined requests"))
        super().on_message_begin()
        self._in_head, self._in_body = True, False
        self._head_bytes = self._host_headers = self._framing_bytes = 0
        self._waited_s = 0.0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or trailer."""
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)
        self._host_headers += self.headers[-1][0] == b"host"
        if len(self.headers) > MAX_HEADERS:
            self._stop_parsing(HeadTooLargeError(f"more than {MAX_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._stop_parsing(MalformedHttpError(f"HTTP/{version} is not supported"))
        if self._host_headers != 1 and (version != "1.0" or self._host_headers):
            self._stop_parsing(MalformedHttpError("send exactly one Host header"))
        # The parser would treat the body as another protocol's data, or as the next request (request smuggling).
        if self.parser.should_upgrade() and any(name in LENGTH_HEADERS for name, _ in self.headers):
            self._stop_parsing(MalformedHttpError("an upgrade request must not have a body"))
        # The parser would pass on the coded bytes as the body.
        if any(name == b"transfer-encoding" and value.strip().lower() != b"chunked" for name, value in self.headers):
            self._stop_parsing(MalformedHttpError("of the transfer codings, only chunked is supported"))
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._body_bytes = self._framing_bytes = self._discarded_bytes = 0
        self._waited_s = 0.0

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._framing_bytes -= (1 + MAX_FRAMING_RATIO) * len(body)
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        self._framing_bytes = 0
        self._waited_s = 0.0

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedHttpError(msg))

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.max_head_bytes:
            self._stop_parsing(self._head_too_large())

    def _head_too_large(self) -> KithError:
        return HeadTooLargeError(f"the head has more than {self._limits.max_head_bytes} bytes, the limit")

    def _stop_parsing(self, error: KithError) -> None:
        """Stop the parser from within its callback. ``data_received`` then sends the error."""
        self._parse_error = error
        raise error

    def _check_progress(self) -> None:
        if self._delayed_refusal is not None:
            self._respond_and_close(self._delayed_refusal)
            return
        self._timer = self.loop.call_later(self._check_interval_s, self._check_progress)
        limits = self._limits
        if self.flow.write_paused or self.transport.is_closing():
            self._unread_bytes = self._unread_bytes or self.transport.get_write_buffer_size()
            self._unread_s += self._check_interval_s
            if self._unread_s > limits.patience_s + self._unread_bytes / limits.min_rate:
                log.info("closed a connection whose client did not read the response")
                self.transport.abort()
            return
        self._unread_s, self._unread_bytes = 0.0, 0
        if not self._waits_for_client():
            return
        self._waited_s += self._check_interval_s
        received = self._body_bytes if self._in_body and not self._discarded_bytes else 0
        if self._waited_s > limits.patience_s + received / limits.min_rate:
            answered = self._discarding or (self._in_body and self.cycle.response_complete)
            if answered or not (self._in_head or self._in_body):
                self.transport.close()
            else:
                self._refuse(ClientTooSlowError("the request did not arrive in time"))

    def _waits_for_client(self) -> bool:
        if self.flow.read_paused:
            return False
        if self._in_body:
            return not self.cycle.waiting_for_100_continue
        return self._discarding or self.cycle is None or self.cycle.response_complete

    def resume_writing(self) -> None:
        self._unread_s, self._unread_bytes = 0.0, 0
        super().resume_writing()

    def _discard(self, size: int) -> None:
        self._discarded_bytes += size
        if self._discarded_bytes > MAX_LINGER_BYTES:
            self.transport.close()

    def _refuse(self, error: KithError) -> None:
        """Send the error and discard further input. If an earlier request awaits its response, send only that."""
        log.info("refused: %s, %s", error.code, error.detail)
        self._server.on_refusal(error.code)
        self._discarding = True
        self._waited_s = 0.0
        if self.cycle is not None and not self.cycle.response_complete:
            if not self._in_body:
                self.cycle.keep_alive = False
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started or self.pipeline:
                self.transport.close()
                return
        self.transport.write(_encode_response(error))
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _refuse_connection(self, detail: str) -> None:
        self._server.log_refusal(detail, self.loop.time())
        self._server.on_refusal(TooManyConnectionsError.code)
        self._discarding = True
        # A refused connection does not count towards the limit.
        self.connections.discard(self)
        self._uncount()
        error = TooManyConnectionsError(detail)
        if self._server.delayed < MAX_DELAYED:
            self._server.delayed += 1
            self._delayed_refusal = error  # the timer sends it
        else:
            self._respond_and_close(error)

    def _respond_and_close(self, error: KithError) -> None:
        self.transport.write(_encode_response(error))
        self.transport.close()


def _encode_response(error: KithError) -> bytes:
    body = json.dumps(error.document()).encode()
    head = [STATUS_LINE[error.status], b"content-type: application/problem+json\r\nconnection: close\r\n"]
    if error.status == 503:
        head.append(b"retry-after: 1\r\n")
    return b"".join([*head, b"content-length: %d\r\n\r\n" % len(body), body])

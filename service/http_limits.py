"""What a connection may ask of the HTTP server before, around and after what it means: uvicorn's protocol, bounded.

uvicorn and the parser below it set no limit to the length of a head, to pipelined requests, to the bytes around a
chunked body, nor to the time that any of them takes. Here each has one; what is refused is told why, and read no more.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import (
    ClientTooSlowError,
    HeadTooLargeError,
    KithError,
    MalformedHttpError,
    TooManyConnectionsError,
)

MOST_HEADERS: Final = 100
MOST_PIPELINED: Final = 16
FRAMING: Final = 8
"""Bytes around a chunked body's, for each of its own: a chunk of one byte has five."""
LENGTHS: Final = (b"content-length", b"transfer-encoding")
LINGER_BYTES: Final = 10_000_000
"""Read and dropped after an answer, so that who still sends can read it: closing at once would take it back."""
TOLD_EVERY_S: Final = 10.0
MAX_DELAYED: Final = 250
"""Maximum number of connections above the limit that wait for their 503, a second at most, so that clients which
reconnect at once leave time for accepted work. Further ones get it at once, which bounds open descriptors."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpLimits:
    """``patience_s``: for a head; for a body or the reading of an answer, beyond what ``least_rate`` (bytes/s) gives
    it. ``connections``: at once, in all and of one address (IPv6: of one /64)."""

    connections: int
    connections_per_address: int
    head_bytes: int
    patience_s: float
    least_rate: int


def limited(limits: HttpLimits, refused: Callable[[str], None] = lambda code: None) -> type[asyncio.Protocol]:
    """The class of connections of one server. ``refused``: told of each refusal, by the error's code."""
    opened = _Opened(refused)

    class Bounded(_Bounded):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(limits, opened, *given, **named)

    return Bounded


class _Opened:
    """Connections of one server."""

    def __init__(self, refused: Callable[[str], None]) -> None:
        self.by_address: Counter[str] = Counter()
        self.delayed = 0
        self.refused = refused
        self._told_s = -TOLD_EVERY_S

    def tell(self, detail: str, now_s: float) -> None:
        """In the log, but not as often as it happens in a flood."""
        if now_s >= self._told_s + TOLD_EVERY_S:
            self._told_s = now_s
            log.warning("connections are refused: %s", detail)


class _Bounded(HttpToolsProtocol):
    """One timer a connection looks at what it waits for, not one a request. Times count only while the client is
    waited for: neither while its request is worked on, nor while it could not go on sending."""

    def __init__(self, limits: HttpLimits, opened: _Opened, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._limits = limits
        self._opened = opened
        self._look_every_s = min(1.0, limits.patience_s / 4)
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: KithError | None = None
        self._turned_away: TooManyConnectionsError | None = None
        self._is_counted = False
        self._in_head = self._in_body = self._dropping = False
        self._waited_s = self._unread_s = 0.0
        self._head = self._hosts = self._body = self._framing = self._dropped = self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._look_every_s, self._look)
        self._address = _network(self.client[0] if self.client else "")
        self._opened.by_address[self._address] += 1
        self._is_counted = True
        most = self._limits
        if len(self.connections) > most.connections:
            self._turn_away(f"{most.connections} connections are open")
        elif self._opened.by_address[self._address] > most.connections_per_address:
            self._turn_away(f"{most.connections_per_address} connections are open from this address")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._opened.delayed -= self._turned_away is not None
        self._turned_away = None
        self._uncount()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _uncount(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._opened.by_address[self._address] -= 1
            if not self._opened.by_address[self._address]:
                del self._opened.by_address[self._address]

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._dropping:
            self._drop(len(data))
            return
        self._framing += len(data)
        left = memoryview(data)
        while left:
            try:
                self.parser.feed_data(left)
                break
            except httptools.HttpParserUpgrade as upgrade:
                # An upgrade that is not made is a request like others (RFC 9110, 7.8).
                left = left[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse(self._refusal or MalformedHttpError(f"this is not HTTP/1.1: {error}"))
                return
        if self._framing > self._limits.head_bytes:
            self._refuse(
                MalformedHttpError("there is far more around the body's chunks than in them")
                if self._in_body
                else self._long_head()
            )

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MOST_PIPELINED:
            self._stop(MalformedHttpError(f"more than {MOST_PIPELINED} requests wait for their answers"))
        super().on_message_begin()
        self._in_head, self._in_body = True, False
        self._head = self._hosts = self._framing = 0
        self._waited_s = 0.0

    def on_url(self, url: bytes) -> None:
        self._lengthen(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers, too."""
        self._lengthen(len(name) + len(value) + 4)
        super().on_header(name, value)
        self._hosts += self.headers[-1][0] == b"host"
        if len(self.headers) > MOST_HEADERS:
            self._stop(HeadTooLargeError(f"more than {MOST_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._stop(MalformedHttpError(f"HTTP/{version} is not spoken"))
        if self._hosts != 1 and (version != "1.0" or self._hosts):
            self._stop(MalformedHttpError("a request has one header Host"))
        # The parser takes what follows, its body, for another protocol's, or else for the next request.
        if self.parser.should_upgrade() and any(name in LENGTHS for name, _ in self.headers):
            self._stop(MalformedHttpError("the protocol is not changed here, least of all by a request with a body"))
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._body = self._framing = self._dropped = 0
        self._waited_s = 0.0

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._framing -= (1 + FRAMING) * len(body)
        if self.cycle.response_complete:
            self._drop(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        self._framing = 0
        self._waited_s = 0.0

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedHttpError(msg))

    def _lengthen(self, more: int) -> None:
        self._head += more
        if self._head > self._limits.head_bytes:
            self._stop(self._long_head())

    def _long_head(self) -> KithError:
        return HeadTooLargeError(f"the head has more than {self._limits.head_bytes} bytes, the limit")

    def _stop(self, refusal: KithError) -> None:
        """From within the parser, which stops at an exception."""
        self._refusal = refusal
        raise refusal

    def _look(self) -> None:
        if self._turned_away is not None:
            self._answer_and_close(self._turned_away)
            return
        self._timer = self.loop.call_later(self._look_every_s, self._look)
        most = self._limits
        if self.flow.write_paused or self.transport.is_closing():
            self._unread = self._unread or self.transport.get_write_buffer_size()
            self._unread_s += self._look_every_s
            if self._unread_s > most.patience_s + self._unread / most.least_rate:
                log.info("a client did not read its answer: closed")
                self.transport.abort()
            return
        self._unread_s, self._unread = 0.0, 0
        if not self._is_waited_for():
            return
        self._waited_s += self._look_every_s
        sent = self._body if self._in_body and not self._dropped else 0
        if self._waited_s > most.patience_s + sent / most.least_rate:
            answered = self._dropping or (self._in_body and self.cycle.response_complete)
            if answered or not (self._in_head or self._in_body):
                self.transport.close()
            else:
                self._refuse(ClientTooSlowError("the request did not come in time"))

    def _is_waited_for(self) -> bool:
        if self.flow.read_paused:
            return False
        if self._in_body:
            return not self.cycle.waiting_for_100_continue
        return self._dropping or self.cycle is None or self.cycle.response_complete

    def resume_writing(self) -> None:
        self._unread_s, self._unread = 0.0, 0
        super().resume_writing()

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > LINGER_BYTES:
            self.transport.close()

    def _refuse(self, refusal: KithError) -> None:
        """Answer, and read on only to be read. Where an answer is due to an earlier request, that one is the last."""
        log.info("refused: %s, %s", refusal.code, refusal.detail)
        self._opened.refused(refusal.code)
        self._dropping = True
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
        self.transport.write(_answer(refusal))
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _turn_away(self, detail: str) -> None:
        self._opened.tell(detail, self.loop.time())
        self._opened.refused(TooManyConnectionsError.code)
        self._dropping = True
        # A refused connection takes no place from the next one.
        self.connections.discard(self)
        self._uncount()
        refusal = TooManyConnectionsError(detail)
        if self._opened.delayed < MAX_DELAYED:
            self._opened.delayed += 1
            self._turned_away = refusal  # answered by the timer
        else:
            self._answer_and_close(refusal)

    def _answer_and_close(self, refusal: KithError) -> None:
        self.transport.write(_answer(refusal))
        self.transport.close()


def _network(address: str) -> str:
    """Whoever has an IPv6 address has 2^64 of them."""
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))


def _answer(refusal: KithError) -> bytes:
    body = json.dumps(refusal.document()).encode()
    head = [STATUS_LINE[refusal.status], b"content-type: application/problem+json\r\nconnection: close\r\n"]
    if refusal.status == 503:
        head.append(b"retry-after: 1\r\n")
    return b"".join([*head, b"content-length: %d\r\n\r\n" % len(body), body])

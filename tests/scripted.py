"""HTTP server on loopback with prepared answers, to simulate a failing service."""

from __future__ import annotations

import asyncio
import inspect
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from kith import AsyncKith, Kith
from tests.local_http import Handler, served_by


@dataclass(frozen=True)
class Answer:
    """Prepared answer. ``breaks`` resets the connection after the request. ``late`` delays the answer until ``go``."""

    status: int = 200
    body: bytes = b'{"status": "ok", "version": "1"}'
    headers: dict[str, str] = field(default_factory=dict)
    breaks: bool = False
    late: bool = False


BUSY = Answer(503, b'{"code": "overloaded", "detail": "the queue is full"}', {"Retry-After": "0"})
BROKEN = Answer(breaks=True)
OK = Answer()
ENROLLED = Answer(201, b'{"subject": "ada", "enrolled_count": 0, "results": []}')

Kind = type[Kith] | type[AsyncKith]
WITH_BOTH = pytest.mark.parametrize("kind", [Kith, AsyncKith])


def ask(kind: Kind, url: str, call: Callable[[Any], Any], **options: Any) -> Any:
    """Return the result of a call of one client; of a list or stream, its items."""

    async def work() -> Any:
        async with AsyncKith(url, **options) as kith:
            answer = call(kith)
            return await answer if inspect.isawaitable(answer) else [item async for item in answer]

    if kind is AsyncKith:
        return asyncio.run(work())
    with Kith(url, **options) as kith:
        answer = call(kith)
        return list(answer) if isinstance(answer, Iterator) else answer


@dataclass
class Script:
    """Prepared answers and recorded requests.

    Attributes:
        asked: method, path, headers and body of each request.
        arrived: set when a request arrives.
        go: releases late answers.
    """

    url: str
    answers: list[Answer]
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


@contextmanager
def answering(*answers: Answer) -> Iterator[Script]:
    """Serve the answers in order, then repeat the last one."""
    script = Script("", list(answers))

    class Scripted(Handler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            script.asked.append((self.command, self.path, dict(self.headers), self.read_body()))
            script.arrived.set()
            answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            if answer.late:
                self._wait()
            if answer.breaks:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
                return
            with suppress(OSError):
                self.answer(answer.status, answer.body, answer.headers)

        def _wait(self) -> None:
            self.connection.settimeout(0.01)
            while not script.go.is_set():
                with suppress(TimeoutError):
                    if not self.connection.recv(1, socket.MSG_PEEK):
                        return
            self.connection.settimeout(None)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = reply

        def finish(self) -> None:
            with suppress(OSError, ValueError):
                super().finish()

    with served_by(Scripted) as script.url:
        try:
            yield script
        finally:
            script.go.set()

"""A real receiver of webhooks on loopback, which checks every signature and can refuse, wait or go away."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE_S = 60


@dataclass(frozen=True)
class Message:
    """A request as it came: ``id`` is the header webhook-id."""

    id: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document

    def is_signed_by(self, secret: str) -> bool:
        """Check the signature as the specification of Standard Webhooks describes it, without Kith's own code."""
        signed = f"{self.id}.{self.headers['webhook-timestamp']}.".encode() + self.body
        digest = hmac.new(base64.b64decode(secret.removeprefix("whsec_")), signed, hashlib.sha256).digest()
        assert abs(time.time() - int(self.headers["webhook-timestamp"])) < PATIENCE_S
        return self.headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"


@dataclass
class Receiver:
    """``answers``: statuses of the next requests; then ``status``. ``messages``: all requests, in order."""

    origin: str
    status: int = 204
    answers: list[int] = field(default_factory=list)
    retry_after: str | None = None
    messages: list[Message] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    open: threading.Event = field(default_factory=threading.Event)
    """Answers wait while it is clear."""

    def wait_for(self, count: int) -> list[Message]:
        """Return the messages once there are ``count``."""
        with self.changed:
            arrived = self.changed.wait_for(lambda: len(self.messages) >= count, PATIENCE_S)
            assert arrived, f"{len(self.messages)} messages instead of {count}"
            return list(self.messages)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Receive until the block is left."""
    receiver = Receiver("")
    receiver.open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.open.wait(PATIENCE_S)
            with receiver.changed:
                receiver.messages.append(Message(headers["webhook-id"], self.path, headers, body))
                status = receiver.answers.pop(0) if receiver.answers else receiver.status
                receiver.changed.notify_all()
            self.send_response(status)
            self.send_header("Content-Length", "0")
            if receiver.retry_after is not None:
                self.send_header("Retry-After", receiver.retry_after)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    receiver.origin = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        receiver.open.set()
        server.shutdown()
        server.server_close()
        thread.join()

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
from typing import Any

from tests.local_http import Handler, served_by

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

    class Receiving(Handler):
        def receive(self) -> None:
            body = self.read_body()
            if len(body) < int(self.headers["Content-Length"]):
                return  # its sender was killed
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.open.wait(PATIENCE_S)
            with receiver.changed:
                receiver.messages.append(Message(headers["webhook-id"], self.path, headers, body))
                status = receiver.answers.pop(0) if receiver.answers else receiver.status
                receiver.changed.notify_all()
            again = {} if receiver.retry_after is None else {"Retry-After": receiver.retry_after}
            self.answer(status, headers={"Location": "http://127.0.0.1:9/elsewhere", **again})

        do_POST = receive

    with served_by(Receiving) as receiver.origin:
        try:
            yield receiver
        finally:
            receiver.open.set()

"""Delivery of events to webhooks: one process at a time sends for all, in order per webhook.

A process that dies is replaced when its lease ends. What it sent but did not record is sent again with the same ID.
An event that fails delays the later ones, until the receiver accepts it or is switched off.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

from kith.wire.fields import rfc3339
from service.core.actor import Threads
from service.core.errors import KithError, RefusedError
from service.core.periodic import PeriodicTask
from service.domain.events import GONE
from service.observability.metrics import Metrics
from service.operations.event_streams import TOGETHER_S, EventStreams
from service.operations.progress import Progress
from service.security.outbound_http import TRANSPORT_ERRORS, NotConnectedError, OutboundHttp, TargetRefusedError
from service.security.sealing import ENCODER
from service.security.webhook_signature import signature
from service.storage.db.leases import Lease
from service.storage.events.log import EventLog, StoredEvent
from service.storage.events.outbox import Webhook
from service.storage.repositories.receivers import ReceiverStore

POLL_S: Final = 1.0
TIMEOUT_S: Final = 15.0
"""Timeout of one attempt: name resolution, connection and response."""
HEADERS: Final = {"User-Agent": "kith", "Content-Type": "application/json", "Connection": "close"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """Answer to one attempt. ``status``: None without a response. ``error``: None after success."""

    status: int | None
    error: str | None
    retry_after_s: float | None = None


class WebhookSender:
    """Sender of signed requests. Safe to share within one event loop."""

    def __init__(self, http: OutboundHttp, timeout_s: float = TIMEOUT_S) -> None:
        self._http = http
        self._timeout_s = timeout_s

    def check(self, url: str) -> None:
        """Raises webhook_refused if webhooks to this URL are not allowed. No connection is made."""
        try:
            self._http.target(url)
        except TargetRefusedError as error:
            raise RefusedError("webhook_refused", "webhooks to this URL are not allowed") from error

    async def send(self, webhook: Webhook, message_id: str, body: bytes) -> Answer:
        """Send a body once. Redirects are not followed, and the response's body is not read. Never raises."""
        timestamp = int(time.time())
        headers = {
            **HEADERS,
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(webhook.secret, message_id, timestamp, body),
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                target = self._http.target(webhook.url)
                async with self._http.request("POST", target, headers, self._timeout_s, body) as response:
                    status, wanted = response.status_code, response.headers.get("Retry-After", "")
        except TargetRefusedError:
            return Answer(None, "the address is not allowed, or its host does not exist")
        except NotConnectedError:
            return Answer(None, "no connection could be made")
        except TimeoutError:
            return Answer(None, f"no response within {self._timeout_s:g} s")
        except TRANSPORT_ERRORS:
            return Answer(None, "the connection broke")
        if 200 <= status < 300:
            return Answer(status, None)
        asked_s = float(wanted) if re.fullmatch("[0-9]{1,9}", wanted) else None  # a date means the usual pause
        return Answer(status, f"the receiver returned status {status}", asked_s)

    async def test(self, webhook: Webhook) -> Answer:
        """Send an event of the type ``test``, which is not stored."""
        event = {"type": "test", "timestamp": rfc3339(datetime.now(UTC)), "data": {}}
        return await self.send(webhook, uuid.uuid4().hex, ENCODER.encode(event).encode())


class WebhookDelivery(PeriodicTask):
    """Delivery of events to webhooks in the background."""

    def __init__(
        self,
        events: EventLog,
        receivers: ReceiverStore,
        lease: Lease,
        sender: WebhookSender,
        metrics: Metrics,
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__(poll_s, "webhooks wait", log)
        self._events = events
        self._receivers = receivers
        self._sender = sender
        self._metrics = metrics
        self._known: dict[int, Progress] = {}
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._threads = Threads(2, "webhooks")
        self._lease = lease

    async def _close(self) -> None:
        for task in self._sending.values():
            task.cancel()  # an interrupted attempt is repeated, by any process
        await asyncio.gather(*self._sending.values(), return_exceptions=True)
        await self._threads.run(self._lease.release)
        self._threads.shutdown()

    async def _look(self) -> None:
        # Reads first: without events, nothing is written, not even a lease.
        busy = set(self._sending)
        waiting = await self._threads.run(self._receivers.waiting)
        if (waiting or self._sending) and not await self._threads.run(self._lease.hold):
            return
        for webhook in waiting:
            if webhook.pk in busy:  # what was read of it may be older than what its task knows
                continue
            new = Progress(self._receivers, self._threads, webhook.pk, webhook.place)
            known = self._known.get(webhook.pk)
            progress = self._known[webhook.pk] = known if known is not None and known.stored == webhook.place else new
            if progress.is_due:
                self._sending[webhook.pk] = task = asyncio.create_task(self._send(webhook, progress))
                task.add_done_callback(partial(self._ended, webhook.pk))
        if not waiting and not self._sending:
            await asyncio.sleep(TOGETHER_S)  # else each event for streams costs a look

    def _ended(self, webhook_pk: int, task: asyncio.Task[None]) -> None:
        del self._sending[webhook_pk]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("webhooks wait", exc_info=error)

    async def _send(self, webhook: Webhook, progress: Progress) -> None:
        """Send a webhook what it waits for, in order, up to the first event that fails."""
        attempt = partial(self._attempt, webhook, progress)
        try:
            while await progress.send(self._events, webhook.filter, attempt, lambda: self._lease.is_held):
                pass
        except KithError as error:
            log.warning("webhook %s waits: %s", webhook.id, error.detail)

    async def _attempt(self, webhook: Webhook, progress: Progress, event: StoredEvent) -> bool:
        """Send an event once, and return whether the receiver accepted it."""
        body = ENCODER.encode(event.document).encode()
        answer = await self._sender.send(webhook, event.id, body)
        if answer.error is None:
            progress.succeeded()
            self._metrics.events.labels("webhook").inc()
            return True
        self._metrics.event_failures.labels("webhook").inc()
        progress.failed(answer.error, answer.retry_after_s, is_gone=answer.status == GONE)
        if progress.place.is_off:
            log.error("webhook %s is switched off: %s. A replay switches it on again.", webhook.id, answer.error)
        elif progress.failures == 1:
            log.warning("webhook %s fails; its events wait: %s", webhook.id, answer.error)
        return False


@dataclass(frozen=True)
class Webhooks:
    """Tasks that send the events of a server: to webhooks, streams and MQTT."""

    sender: WebhookSender
    delivery: WebhookDelivery
    streams: EventStreams
    mqtt: PeriodicTask | None

    def wake(self) -> None:
        """Send new events now. Call on the event loop."""
        self.delivery.wake()
        self.streams.wake()
        if self.mqtt is not None:
            self.mqtt.wake()

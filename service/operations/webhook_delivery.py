"""Delivery of events to webhooks: one process at a time sends for all, in order per webhook and gallery.

A process that dies is replaced when its lease ends. What it sent but did not record is sent again with the same ID.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

from kith.wire.fields import rfc3339
from service.core.actor import run_in_thread
from service.core.errors import KithError, WebhookRefusedError
from service.core.periodic import PeriodicTask
from service.domain.events import is_refusal, next_attempt
from service.observability.metrics import Metrics
from service.operations.event_streams import EventStreams
from service.operations.held_lease import HeldLease
from service.security.outbound_http import TRANSPORT_ERRORS, NotConnectedError, OutboundHttp, TargetRefusedError
from service.security.sealing import ENCODER
from service.security.webhook_signature import signature
from service.storage.db.leases import Lease
from service.storage.events.deliveries import Attempt, DeliveryStore, DueDelivery, Stream
from service.storage.events.outbox import Webhook
from service.storage.repositories.webhooks import WebhookStore

POLL_S: Final = 1.0
LEASE_S: Final = 20.0
"""Time until another process takes over the deliveries of a dead one."""
TIMEOUT_S: Final = 15.0
"""Timeout of one attempt: name resolution, connection and response."""
MAX_STREAMS: Final = 16
"""Streams that are sent at the same time."""
MAX_STREAMS_PER_WEBHOOK: Final = 4
"""A slow receiver leaves room for the others."""
SWEEP_S: Final = 60.0
HEADERS: Final = {"User-Agent": "kith", "Content-Type": "application/json", "Connection": "close"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """Answer to one attempt. ``status``: None without a response. ``error``: None after success."""

    status: int | None
    error: str | None


class WebhookSender:
    """Sender of signed requests. Safe to share within one event loop."""

    def __init__(self, http: OutboundHttp, timeout_s: float = TIMEOUT_S) -> None:
        self._http = http
        self._timeout_s = timeout_s

    def check(self, url: str) -> None:
        """Raises WebhookRefusedError if webhooks to this URL are not allowed. No connection is made."""
        if self._http.is_disabled:
            raise WebhookRefusedError("webhooks are disabled")
        try:
            self._http.target(url)
        except TargetRefusedError as error:
            raise WebhookRefusedError("webhooks to this URL are not allowed") from error

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
                    status = response.status_code
        except TargetRefusedError:
            return Answer(None, "the address is not allowed, or its host does not exist")
        except NotConnectedError:
            return Answer(None, "no connection could be made")
        except TimeoutError:
            return Answer(None, f"no response within {self._timeout_s:g} s")
        except TRANSPORT_ERRORS:
            return Answer(None, "the connection broke")
        return Answer(status, None if 200 <= status < 300 else f"the receiver returned status {status}")

    async def test(self, webhook: Webhook) -> Answer:
        """Send an event of the type ``test``, which is not stored."""
        event = {"type": "test", "timestamp": rfc3339(datetime.now(UTC)), "data": {}}
        return await self.send(webhook, uuid.uuid4().hex, ENCODER.encode(event).encode())


class WebhookDelivery(PeriodicTask):
    """Delivery of events to webhooks in the background."""

    def __init__(
        self,
        store: DeliveryStore,
        lease: Lease,
        sender: WebhookSender,
        metrics: Metrics,
        poll_s: float = POLL_S,
        lease_s: float = LEASE_S,
    ) -> None:
        super().__init__(poll_s, "webhooks wait", log)
        self._store = store
        self._sender = sender
        self._metrics = metrics
        self._swept_s = time.monotonic()
        self._streams: dict[Stream, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="webhooks")
        self._lease = HeldLease(lease, store.now, lease_s, self._threads)

    async def _close(self) -> None:
        for task in self._streams.values():
            task.cancel()  # an interrupted attempt is repeated, by any process
        await asyncio.gather(*self._streams.values(), return_exceptions=True)
        await self._lease.release()
        self._threads.shutdown()

    async def _look(self) -> None:
        # Reads first: without events, nothing is written, not even a lease.
        due = await run_in_thread(
            self._threads, self._store.due, set(self._streams), MAX_STREAMS, MAX_STREAMS_PER_WEBHOOK
        )
        if (due or self._streams) and not await self._lease.hold():
            return
        for webhook, gallery_pk, deliveries in due:
            stream = webhook.pk, gallery_pk
            self._streams[stream] = task = asyncio.create_task(self._send_all(webhook, deliveries))
            task.add_done_callback(partial(self._ended, stream))
        if time.monotonic() - self._swept_s > SWEEP_S:
            self._swept_s = time.monotonic()
            await run_in_thread(self._threads, self._store.sweep)

    def _ended(self, stream: Stream, _task: asyncio.Task[None]) -> None:
        del self._streams[stream]
        self._wake.set()  # the stream may have further deliveries

    async def _send_all(self, webhook: Webhook, deliveries: Sequence[DueDelivery]) -> None:
        """Send deliveries of a stream in order, up to the first that fails, and record the results."""
        attempts: list[Attempt] = []
        try:
            for delivery in deliveries:
                if not self._lease.is_held:
                    break
                if not await run_in_thread(self._threads, self._store.is_pending, delivery.pk):
                    continue
                attempts.append(await self._attempt(webhook, delivery))
                if attempts[-1].state != "delivered":
                    break
        finally:
            try:
                await run_in_thread(self._threads, self._store.record, attempts)
            except KithError as error:
                log.warning("results of webhook %s are not recorded: %s", webhook.id, error.detail)
                await asyncio.sleep(0 if self._stopping else self._interval_s)

    async def _attempt(self, webhook: Webhook, delivery: DueDelivery) -> Attempt:
        count = delivery.attempts + 1
        if delivery.body is None:
            return Attempt(delivery.pk, "dead", delivery.attempts, None, "the event cannot be decrypted", None)
        answer = await self._sender.send(webhook, delivery.event, delivery.body)
        if answer.error is None:
            self._metrics.count_event("webhook")
            return Attempt(delivery.pk, "delivered", count, answer.status, None, None)
        self._metrics.count_event_failure("webhook")
        again = next_attempt(count, delivery.at, datetime.now(UTC), answer.status)
        if again is None:
            log.warning("webhook %s: an event is given up after %d attempts: %s", webhook.id, count, answer.error)
        elif count == 1 or is_refusal(answer.status):
            log.info("webhook %s: %s", webhook.id, answer.error)
        return Attempt(delivery.pk, "dead" if again is None else "pending", count, answer.status, answer.error, again)


@dataclass(frozen=True)
class Webhooks:
    """Webhooks of a server: their rows, deliveries, and the task that sends; event streams, and the task for MQTT."""

    store: WebhookStore
    deliveries: DeliveryStore
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

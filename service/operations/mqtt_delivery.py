"""Delivery of events to an MQTT broker: one process at a time sends for all, in order per gallery.

Events that are sent but not recorded when a process or the broker ends are sent again with the same ID. While the
broker is away, deliveries wait; only their age and number end them (``service.storage.events.deliveries``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, Self, get_args
from urllib.parse import unquote, urlsplit

import aiomqtt

from kith.wire.common import IdentifyOutcome
from service.core.actor import run_in_thread
from service.core.periodic import PeriodicTask
from service.observability.metrics import Metrics
from service.operations.held_lease import HeldClaim, HeldLease
from service.security.sealing import ENCODER
from service.storage.db.leases import Lease
from service.storage.events.deliveries import Attempt, DeliveryStore, DueDelivery
from service.storage.repositories.webhooks import WebhookStore

POLL_S: Final = 1.0
RECONNECT_S: Final = 2.0
LEASE_S: Final = 20.0
"""Time until another process takes over the deliveries of a dead one."""
TIMEOUT_S: Final = 5.0
"""Timeout of the connection, and of the broker's acknowledgement."""
KEEPALIVE_S: Final = 15
"""Time between signs of life; the broker reports the service as offline after one and a half."""
STATUS_S: Final = 30.0
DISCOVER_S: Final = 30.0
"""Time between looks for new and deleted galleries."""
MAX_GALLERIES: Final = 16
"""Galleries whose events are read together."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Broker:
    """MQTT broker. ``discovery``: prefix of Home Assistant's discovery topics; None: no discovery."""

    host: str
    port: int
    tls: bool
    user: str | None
    password: str | None = field(repr=False)
    prefix: str
    discovery: str | None

    @classmethod
    def of_url(cls, url: str, password: str | None, discovery: str | None) -> Broker:
        """``url``: as the setting KITH_MQTT_URL."""
        parts = urlsplit(url)
        tls = parts.scheme == "mqtts"
        port, user = parts.port or (8883 if tls else 1883), None if parts.username is None else unquote(parts.username)
        return cls(parts.hostname or "", port, tls, user, password, parts.path.strip("/") or "kith", discovery)

    @property
    def status_topic(self) -> str:
        return f"{self.prefix}/status"

    def topic(self, event: dict[str, Any]) -> str:
        """Return the topic of an event: PREFIX/GALLERY/TYPE, and of a decision PREFIX/GALLERY/decision/OUTCOME."""
        outcome = f"/{event['data']['outcome']}" if event["type"] == "decision" else ""
        return f"{self.prefix}/{event['data']['gallery']}/{event['type']}{outcome}"


class MqttDelivery(PeriodicTask):
    """Delivery of all events to one broker in the background. ``gallery_names`` blocks."""

    def __init__(
        self,
        broker: Broker,
        store: DeliveryStore,
        receivers: WebhookStore,
        lease: Lease,
        gallery_names: Callable[[], set[str]],
        metrics: Metrics,
        lease_s: float = LEASE_S,
    ) -> None:
        super().__init__(RECONNECT_S, "MQTT waits", log)
        self._broker = broker
        self._store = store
        self._gallery_names = gallery_names
        self._metrics = metrics
        metrics.mqtt_connected[broker.host] = False
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="mqtt")
        self._lease = HeldLease(lease, store.now, lease_s, self._threads)
        self._claim = HeldClaim(lambda: run_in_thread(self._threads, receivers.claim, "mqtt"))
        self._announced = set[str]()
        self._discovered_s: float | None = None
        self._is_away = False

    async def __aenter__(self) -> Self:
        await self._claim.hold()  # events are kept before the first request
        return await super().__aenter__()

    async def _close(self) -> None:
        await self._lease.release()
        self._threads.shutdown()

    async def _look(self) -> None:
        if not await self._lease.hold():
            return
        try:
            async with self._client() as client:
                if self._is_away:
                    log.info("the MQTT broker is back")
                self._is_away, self._discovered_s = False, None
                self._metrics.mqtt_connected[self._broker.host] = True
                await self._serve(client)
                if self._stopping:  # otherwise the server that sends from now on has said "online"
                    await client.publish(self._broker.status_topic, "offline", qos=1, retain=True)
        except aiomqtt.MqttError as error:
            if not self._is_away:
                log.warning("the MQTT broker does not respond; events wait: %s", error)
            self._is_away = True
            self._metrics.count_event_failure("mqtt")
        finally:
            self._metrics.mqtt_connected[self._broker.host] = False

    def _client(self) -> aiomqtt.Client:
        broker = self._broker
        return aiomqtt.Client(
            broker.host,
            broker.port,
            username=broker.user,
            password=broker.password,
            will=aiomqtt.Will(broker.status_topic, "offline", qos=1, retain=True),
            timeout=TIMEOUT_S,
            keepalive=KEEPALIVE_S,
            tls_context=ssl.create_default_context() if broker.tls else None,
        )

    async def _serve(self, client: aiomqtt.Client) -> None:
        """Send until this process stops or loses the lease. Raises MqttError: the connection broke."""
        broken = asyncio.create_task(_until_broken(client))
        said_s: float | None = None
        try:
            while not self._stopping and await self._lease.hold():
                if said_s is None or time.monotonic() > said_s + STATUS_S:
                    # Again and again: the last will of a server that died may come after this one has begun.
                    await client.publish(self._broker.status_topic, "online", qos=1, retain=True)
                    said_s = time.monotonic()
                self._wake.clear()
                await self._claim.hold()
                await self._announce(client)
                if await self._send_due(client):
                    continue
                woken = asyncio.create_task(self._wake.wait())
                await asyncio.wait((woken, broken), timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                if broken.done():
                    broken.result()
        finally:
            broken.cancel()
            with suppress(asyncio.CancelledError, aiomqtt.MqttError):
                await broken

    async def _send_due(self, client: aiomqtt.Client) -> bool:
        """Send due events, and return whether there were any."""
        due = await run_in_thread(self._threads, self._store.due_to_broker, MAX_GALLERIES)
        for deliveries in due:
            if not await self._lease.hold():
                break
            await self._send_all(client, deliveries)
        return bool(due)

    async def _send_all(self, client: aiomqtt.Client, deliveries: Sequence[DueDelivery]) -> None:
        """Send events of one gallery in order, each after the broker has acknowledged the one before."""
        attempts: list[Attempt] = []
        try:
            for delivery in deliveries:
                if not self._lease.is_held or self._stopping:
                    break
                if not await run_in_thread(self._threads, self._store.is_pending, delivery.pk):
                    continue
                count = delivery.attempts + 1
                if delivery.body is None:
                    error = "the event cannot be decrypted"
                    attempts.append(Attempt(delivery.pk, "dead", delivery.attempts, None, error, None))
                    continue
                event = {"id": delivery.event, **json.loads(delivery.body)}
                await client.publish(self._broker.topic(event), ENCODER.encode(event), qos=1)
                attempts.append(Attempt(delivery.pk, "delivered", count, None, None, None))
                self._metrics.count_event("mqtt")
        finally:
            await run_in_thread(self._threads, self._store.record, attempts)

    async def _announce(self, client: aiomqtt.Client) -> None:
        """Announce new galleries to Home Assistant, and remove deleted ones."""
        now_s = time.monotonic()
        recent = self._discovered_s is not None and now_s < self._discovered_s + DISCOVER_S
        if self._broker.discovery is None or recent:
            return
        names = await run_in_thread(self._threads, self._gallery_names)
        known = self._announced if self._discovered_s is not None else set[str]()
        for name in sorted(names - known):
            topic, document = discovery(self._broker, name)
            await client.publish(topic, json.dumps(document), qos=1, retain=True)
        for name in sorted(self._announced - names):
            await client.publish(discovery(self._broker, name)[0], b"", qos=1, retain=True)
        self._announced, self._discovered_s = names, now_s


async def _until_broken(client: aiomqtt.Client) -> None:
    async for _ in client.messages:  # there are none: nothing is subscribed to
        pass


def discovery(broker: Broker, gallery: str) -> tuple[str, dict[str, Any]]:
    """Return the topic and document of a gallery's device (https://www.home-assistant.io/integrations/mqtt/)."""
    device = re.sub("[^A-Za-z0-9_]", lambda found: f"-{ord(found[0]):x}-", f"{broker.prefix}_{gallery}")
    decisions = f"{broker.prefix}/{gallery}/decision"
    identified = f"{decisions}/identified"
    document = {
        "device": {"identifiers": [device], "name": f"Kith {gallery}", "manufacturer": "Kith"},
        "origin": {"name": "Kith", "sw_version": version("kith-face")},
        "availability_topic": broker.status_topic,
        "components": {
            "person": {
                "platform": "sensor",
                "unique_id": f"{device}_person",
                "name": "Last person",
                "icon": "mdi:account",
                "state_topic": identified,
                "value_template": "{{ value_json.data.get('name') or value_json.data.subject }}",
                "json_attributes_topic": identified,
                "json_attributes_template": "{{ value_json.data | tojson }}",
            },
            "decision": {
                "platform": "event",
                "unique_id": f"{device}_decision",
                "name": "Decision",
                "icon": "mdi:face-recognition",
                "event_types": list(get_args(IdentifyOutcome)),
                "state_topic": f"{decisions}/+",
                "value_template": "{{ dict(value_json.data, event_type=value_json.data.outcome) | tojson }}",
            },
        },
    }
    return f"{broker.discovery}/device/{device}/config", document

"""Delivery of events to an MQTT broker: one process at a time sends for all, in order.

Events that are sent but not recorded when a process or the broker ends are sent again with the same ID. While the
broker is away, events wait (``service.storage.repositories.receivers``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, Final, Self, get_args
from urllib.parse import unquote, urlsplit

import aiomqtt

from kith.wire.common import IdentifyOutcome
from service.core.actor import Threads
from service.core.periodic import PeriodicTask
from service.domain.events import EventFilter
from service.observability.metrics import Metrics
from service.operations.progress import Progress
from service.security.sealing import ENCODER
from service.storage.db.leases import Lease
from service.storage.events.log import EventLog, StoredEvent
from service.storage.repositories.receivers import ReceiverStore

POLL_S: Final = 1.0
RECONNECT_S: Final = 2.0
TIMEOUT_S: Final = 5.0
"""Timeout of the connection, and of the broker's acknowledgement."""
KEEPALIVE_S: Final = 15
"""Time between signs of life; the broker reports the service as offline after one and a half."""
STATUS_S: Final = 10.0
"""Time between reports that the service is online, which fail if the connection has ended."""
DISCOVER_S: Final = 30.0
"""Time between looks for new and deleted galleries."""
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
        events: EventLog,
        receivers: ReceiverStore,
        lease: Lease,
        gallery_names: Callable[[], set[str]],
        metrics: Metrics,
    ) -> None:
        super().__init__(RECONNECT_S, "MQTT waits", log)
        self._broker = broker
        self._events = events
        self._receivers = receivers
        self._gallery_names = gallery_names
        self._metrics = metrics
        metrics.mqtt_connected[broker.host] = False
        self._threads = Threads(2, "mqtt")
        self._lease = lease
        self._progress: Progress | None = None
        self._announced = set[str]()
        """Topics of devices that the broker may retain."""
        self._discover_s = 0.0
        """Time of the next look at the galleries on the monotonic clock."""

    async def __aenter__(self) -> Self:
        await self._threads.run(self._receivers.claim, "mqtt")  # before the first request
        return await super().__aenter__()

    async def _close(self) -> None:
        await self._threads.run(self._lease.release)
        self._threads.shutdown()

    async def _look(self) -> None:
        if not await self._threads.run(self._lease.hold):
            return
        progress = await self._resumed()
        try:
            async with self._client() as client:
                if progress.failures:
                    log.info("the MQTT broker is back")
                    progress.succeeded()
                self._discover_s = 0.0
                self._metrics.mqtt_connected[self._broker.host] = True
                await self._serve(client, progress)
                if self._stopping:  # otherwise the server that sends from now on has said "online"
                    await client.publish(self._broker.status_topic, "offline", qos=1, retain=True)
        except aiomqtt.MqttError as error:
            if not progress.failures:
                log.warning("the MQTT broker does not respond; events wait: %s", error)
            progress.failed("the broker does not respond")
            self._metrics.event_failures.labels("mqtt").inc()
            await progress.record(at_once=progress.failures == 1)
        finally:
            self._metrics.mqtt_connected[self._broker.host] = False

    async def _resumed(self) -> Progress:
        """Return the progress from the row, or from memory if it is ahead of the row."""
        await self._threads.run(self._receivers.claim, "mqtt")
        pk, place, topics = await self._threads.run(self._receivers.built_in, "mqtt")
        if self._progress is None or (self._progress.pk, self._progress.stored) != (pk, place):
            self._progress = Progress(self._receivers, self._threads, pk, place)
        self._announced |= set(topics)
        return self._progress

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

    async def _serve(self, client: aiomqtt.Client, progress: Progress) -> None:
        """Send until this process stops or loses the lease. Raises MqttError: the connection broke."""
        due_s, attempt = 0.0, partial(self._publish, client, progress)
        while not self._stopping and await self._threads.run(self._lease.hold):
            if time.monotonic() > due_s:
                # Again and again: the last will of a server that died may come after this one has begun.
                await client.publish(self._broker.status_topic, "online", qos=1, retain=True)
                due_s = time.monotonic() + STATUS_S
                await self._threads.run(self._receivers.claim, "mqtt")
            self._wake.clear()
            await self._announce(client, progress.pk)
            if not await progress.send(self._events, EventFilter(), attempt, self._may_send):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), POLL_S)

    def _may_send(self) -> bool:
        return self._lease.is_held and not self._stopping

    async def _publish(self, client: aiomqtt.Client, progress: Progress, event: StoredEvent) -> bool:
        """Publish an event, and wait until the broker has acknowledged it. Raises MqttError."""
        document = {"id": event.id, **event.document}
        await client.publish(self._broker.topic(document), ENCODER.encode(document), qos=1)
        self._metrics.events.labels("mqtt").inc()
        progress.succeeded()
        return True

    async def _announce(self, client: aiomqtt.Client, receiver_pk: int) -> None:
        """Announce the galleries to Home Assistant, and remove what was announced before, by any process."""
        if time.monotonic() < self._discover_s or (self._broker.discovery is None and not self._announced):
            return
        names = await self._threads.run(self._gallery_names) if self._broker.discovery else set[str]()
        wanted = dict(discovery(self._broker, name) for name in sorted(names))
        is_first = not self._discover_s  # the broker may have lost what it retained
        new = wanted if is_first else {topic: wanted[topic] for topic in wanted.keys() - self._announced}
        if wanted.keys() - self._announced:
            self._announced |= wanted.keys()  # first, so that a successor knows what to remove
            await self._threads.run(self._receivers.announce, receiver_pk, list(self._announced))
        for topic, document in new.items():
            await client.publish(topic, json.dumps(document), qos=1, retain=True)
        if gone := self._announced - wanted.keys():
            for topic in sorted(gone):
                await client.publish(topic, b"", qos=1, retain=True)
            self._announced -= gone
            await self._threads.run(self._receivers.announce, receiver_pk, list(self._announced))
        self._discover_s = time.monotonic() + DISCOVER_S


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

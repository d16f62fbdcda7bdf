"""Events at a real MQTT broker: in order, at least once, over restarts of the broker and of the service."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kith import Kith
from service.core.errors import SettingsError
from service.domain.gallery import Gallery, GallerySettings
from service.operations import mqtt_delivery
from service.server import embedded
from service.settings import load_settings
from service.storage.db.engine import Database
from service.storage.db.leases import Lease
from service.storage.events.log import EventLog
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.receivers import ReceiverStore
from service.storage.repositories.store import Store
from tests.conftest import is_eventually
from tests.faults.servers import free_port
from tests.service.operations.test_webhook_delivery import report, until, waiting

pytest.importorskip("aiomqtt")
import aiomqtt

from service.observability.metrics import Metrics
from service.operations.mqtt_delivery import Broker, MqttDelivery

PATIENCE_S = 30
PASSWORD = "the broker's password"  # noqa: S105 - of the broker of these tests


@dataclass
class Mosquitto:
    """Mosquitto on loopback, which forgets when it is killed what it did not :meth:`save`."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
        if program is None:
            pytest.skip("mosquitto is not installed (Debian: apt-get install mosquitto)")
        passwords, config = self.folder / "passwords", self.folder / "mosquitto.conf"
        subprocess.run(["mosquitto_passwd", "-b", "-c", passwords, "kith", PASSWORD], check=True, capture_output=True)
        passwords.chmod(0o644)
        config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous false\npassword_file {passwords}\nuser root\n"
            f"persistence true\npersistence_location {self.folder}/\n"
        )
        self.process = subprocess.Popen([program, "-c", config], stderr=subprocess.DEVNULL)

    def save(self) -> None:
        """Write subscriptions to disk."""
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR1)
        is_eventually((self.folder / "mosquitto.db").exists)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE_S)

    def broker(self, discovery: str | None = None) -> Broker:
        return Broker("127.0.0.1", self.port, False, "kith", PASSWORD, "faces", discovery)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """SQLite alone: the log of events and its readers are tried with both kinds of database by webhooks."""
    return f"sqlite:///{tmp_path / 'kith.db'}"


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    opened = Mosquitto(tmp_path)
    opened.start()
    yield opened
    opened.kill()


@pytest.fixture
def gallery(database: Database) -> Gallery:
    ReceiverStore(database).claim("mqtt")
    Store(database).galleries.create("door", "f" * 32, 8, GallerySettings())
    return Store(database).galleries.get("door")


@asynccontextmanager
async def delivering(database: Database, broker: Broker, metrics: Metrics | None = None) -> AsyncIterator[MqttDelivery]:
    names = KeyStore(database).gallery_names
    log, receivers = EventLog(database), ReceiverStore(database)
    metrics = metrics or Metrics()
    async with MqttDelivery(broker, log, receivers, Lease(database, "mqtt", 2), names, metrics) as delivery:
        yield delivery


class Subscriber:
    """Subscriber of all topics. ``messages``: topics and documents, in the order of arrival."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []
        self.is_subscribed = asyncio.Event()

    @property
    def numbers(self) -> list[int]:
        return [m["data"]["number"] for topic, m in self.messages if "/decision/" in topic]

    async def listen(self, mosquitto: Mosquitto) -> None:
        while True:
            try:
                async with aiomqtt.Client(
                    "127.0.0.1",
                    mosquitto.port,
                    username="kith",
                    password=PASSWORD,
                    identifier="subscriber",
                    clean_session=False,
                ) as client:
                    await client.subscribe("#", qos=1)
                    self.is_subscribed.set()
                    async for message in client.messages:
                        text = bytes(message.payload).decode()
                        is_json = text.startswith("{")
                        self.messages.append((str(message.topic), json.loads(text) if is_json else text))
            except aiomqtt.MqttError:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def subscribed(mosquitto: Mosquitto) -> AsyncIterator[Subscriber]:
    subscriber = Subscriber()
    task = asyncio.create_task(subscriber.listen(mosquitto))
    await subscriber.is_subscribed.wait()
    yield subscriber
    task.cancel()


def test_events_wait_for_a_broker_that_is_down_or_killed(
    database: Database, gallery: Gallery, mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_delivery, "RECONNECT_S", 0.05)
    metrics = Metrics()

    async def work() -> None:
        async with subscribed(mosquitto) as subscriber:
            mosquitto.save()
            mosquitto.kill()
            await asyncio.to_thread(report, database, gallery, 0, 1)
            async with delivering(database, mosquitto.broker(), metrics) as delivery:
                for is_down, new, expected in ((True, (), range(2)), (False, range(2, 30), range(30))):
                    if not is_down:
                        assert metrics.mqtt_connected == {"127.0.0.1": True}
                        mosquitto.kill()
                        await asyncio.to_thread(report, database, gallery, *new)
                        delivery.wake()
                    await asyncio.sleep(0.2)
                    assert metrics.mqtt_connected == {"127.0.0.1": False}
                    assert await asyncio.to_thread(waiting, database) > 0
                    mosquitto.start()
                    await until(lambda: set(subscriber.numbers) == set(expected))  # noqa: B023
            assert list(dict.fromkeys(subscriber.numbers)) == list(range(30))

    asyncio.run(work())
    assert metrics.mqtt_connected == {"127.0.0.1": False}
    count = metrics.registry.get_sample_value
    sent, failed = (count(f"kith_event{name}_total", {"to": "mqtt"}) for name in ("s_sent", "_failures"))
    assert (sent or 0) >= 30 and (failed or 0) >= 2
    assert waiting(database) == 0


def test_galleries_are_announced_to_home_assistant_until_they_are_deleted(
    database: Database, gallery: Gallery, mosquitto: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those deleted before a restart or a move of the lease, and if the prefix of discovery was unset."""
    monkeypatch.setattr(mqtt_delivery, "DISCOVER_S", 0.05)
    store, topic = Store(database), "homeassistant/device/faces_{}/config".format

    async def work() -> None:
        async with subscribed(mosquitto) as subscriber:
            async with delivering(database, mosquitto.broker("homeassistant")) as delivery:
                await until(lambda: topic("door") in dict(subscriber.messages))
                document = dict(subscriber.messages)[topic("door")]
                await asyncio.to_thread(store.galleries.delete, "door")
                delivery.wake()
                await until(lambda: (topic("door"), "") in subscriber.messages)
                await asyncio.to_thread(store.galleries.create, "hall", "f" * 32, 8, GallerySettings())
                await until(lambda: topic("hall") in dict(subscriber.messages))
            await asyncio.to_thread(store.galleries.delete, "hall")
            await asyncio.to_thread(store.galleries.create, "gate", "f" * 32, 8, GallerySettings())
            async with delivering(database, mosquitto.broker("homeassistant")):
                await until(lambda: (topic("hall"), "") in subscriber.messages)
                await until(lambda: topic("gate") in dict(subscriber.messages))
            async with delivering(database, mosquitto.broker()):
                await until(lambda: (topic("gate"), "") in subscriber.messages)
        assert {c["platform"] for c in document["components"].values()} == {"sensor", "event"}
        assert document["availability_topic"] == "faces/status"
        assert document["components"]["person"]["state_topic"] == "faces/door/decision/identified"

    asyncio.run(work())
    assert ReceiverStore(database).built_in("mqtt")[2] == []


def test_a_server_sends_its_decisions(mosquitto: Mosquitto, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    settings = load_settings(
        data_dir=tmp_path / "data",
        mqtt_url=f"mqtt://kith@127.0.0.1:{mosquitto.port}/house/faces",
        mqtt_password_file=file,
        log_level="ERROR",
    )

    def identify() -> None:
        with embedded(settings) as url, Kith(url) as kith:
            kith.create_gallery("door", risk={"threshold": 0.9})
            kith.identify("door", embeddings=[np.eye(1, kith.model().dimension)[0]])

    async def work() -> None:
        async with subscribed(mosquitto) as subscriber:
            await asyncio.to_thread(identify)
            await until(lambda: ("house/faces/status", "offline") in subscriber.messages)
        ((topic, event),) = [m for m in subscriber.messages if "/decision/" in m[0]]
        assert ("house/faces/status", "online") in subscriber.messages
        assert topic == "house/faces/door/decision/unknown"
        assert event.keys() == {"id", "type", "timestamp", "data"}
        assert not any(word in json.dumps(event) for word in ("embedding", "vector", "image"))

    asyncio.run(work())


def test_addresses_of_brokers() -> None:
    for url, place in (
        ("mqtt://broker", ("broker", 1883, False, None, "kith")),
        ("mqtts://ha@broker.example.org/a/b", ("broker.example.org", 8883, True, "ha", "a/b")),
        ("mqtts://[::1]:1234", ("::1", 1234, True, None, "kith")),
    ):
        found = Broker.of_url(load_settings(mqtt_url=url).mqtt_url or "", None, None)
        assert (found.host, found.port, found.tls, found.user, found.prefix) == place
    for url in ("http://broker", "mqtt://user:password@broker", "mqtt://broker/#", "mqtt://", "broker"):
        with pytest.raises(SettingsError, match="KITH_MQTT_URL"):
            load_settings(mqtt_url=url)

"""503 responses under overload are delayed, so that accepted work gets time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.load import Order, load, post
from bench.photos import astronaut
from service import wiring
from service.api.http.gate import REFUSALS_PER_S
from service.server import embedded
from service.settings import load_settings

CLIENTS = 40
SECONDS = 2.0


def test_clients_that_retry_at_once_are_delayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "QUEUE_SIZE", 1)
    settings = load_settings(data_dir=tmp_path, max_images=1, log_level="ERROR")
    message = post("/v1/detect", "image/jpeg", astronaut(250))
    with embedded(settings) as url:
        order = Order(int(url.rpartition(":")[2]), [message], CLIENTS, SECONDS, 0, b"")
        statuses = asyncio.run(load(order)).statuses
    assert statuses.keys() == {200, 503}
    # Without pacing there are several hundred per second.
    assert statuses[503] <= SECONDS * REFUSALS_PER_S + CLIENTS

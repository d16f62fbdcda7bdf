"""The load generator counts a real server's answers and distinguishes rejected requests."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.load import Generator, Order, look_at, multipart
from bench.servers import naive_server
from models.pack.loading import BUNDLED_PACK
from tests.conftest import jpeg

CLIENTS = 3
LONG_S = 60.0


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    with Generator() as running:
        yield running


def order(port: int, requests: list[bytes], marker: bytes, limit: int) -> Order:
    return Order(port, requests, CLIENTS, LONG_S, 0.0, marker, limit)


def test_answers_and_refusals_are_counted(
    generator: Generator, server: str, group: NDArray[np.uint8], nobody: NDArray[np.uint8]
) -> None:
    photos = [jpeg(group), jpeg(nobody), b"no photo"]
    requests = [multipart("/v1/detect", photo) for photo in photos]
    tally = generator.run(order(urlsplit(server).port or 0, requests, b'"box":', 3 * CLIENTS))
    assert dict(tally.statuses) == {200: 2 * CLIENTS, 422: CLIENTS}
    assert (tally.answered, tally.figures()["failed"]) == (2 * CLIENTS, CLIENTS)
    assert tally.faces == 6 * CLIENTS
    assert len(tally.latencies_ms[200]) == tally.served == 2 * CLIENTS
    assert 0 < tally.seconds < LONG_S
    assert 0 < tally.cpu_s < tally.seconds * 2


def test_the_naive_server_answers(generator: Generator, astronaut: NDArray[np.uint8]) -> None:
    with naive_server(BUNDLED_PACK) as running:
        requests = [multipart("/faces", jpeg(astronaut), "image")]
        tally = generator.run(order(running.port, requests, b'"bbox":', CLIENTS))
        figures = look_at(running.pid)
    assert tally.answered == tally.faces == CLIENTS
    assert figures.cpu_s > 0
    assert 10e6 < figures.rss_bytes <= figures.peak_bytes

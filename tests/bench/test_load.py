"""The load generator counts a real server's answers and distinguishes rejected requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.load import Generator, Order, load, look_at, multipart
from bench.servers import naive_server
from models.pack.loading import BUNDLED_PACK
from tests.conftest import jpeg
from tests.scripted import BROKEN, OK, answering

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


@pytest.mark.parametrize(("warm_up_s", "counted"), [(0.0, {200: 3, 0: 1}), (LONG_S, {})])
def test_a_lost_connection_and_the_warm_up_are_no_answers(warm_up_s: float, counted: dict[int, int]) -> None:
    with answering(OK, BROKEN, OK) as script:
        order = Order(urlsplit(script.url).port or 0, [b"GET / HTTP/1.1\r\n\r\n"], 1, LONG_S, warm_up_s, b"x", 4)
        tally = asyncio.run(load(order))
    assert (dict(tally.statuses), tally.served) == (counted, 3)


def test_the_naive_server_answers(generator: Generator, astronaut: NDArray[np.uint8]) -> None:
    with naive_server(BUNDLED_PACK) as running:
        requests = [multipart("/faces", jpeg(astronaut), "image")]
        tally = generator.run(order(running.port, requests, b'"bbox":', CLIENTS))
        figures = look_at(running.pid)
    assert tally.answered == tally.faces == CLIENTS
    assert figures.cpu_s > 0
    assert 10e6 < figures.rss_bytes <= figures.peak_bytes

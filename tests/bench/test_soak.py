"""The soak test runs for seconds instead of half an hour, and detects faults."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.soak import Plan, Reading, Series, judged_rises, markdown, p99_of_thirds, soak
from bench.soak_load import PEOPLE, Asking, Book, Client, Known, Photos
from kith import Kith
from models.vision.recognition import l2_normalize
from tests.conftest import jpeg
from tests.faults import LONG

pytestmark = pytest.mark.long

SHORT = Plan(rounds=2, round_s=3, clients=3, own=2, fixed=4, others=12, rest_s=0.5)


class One:
    """Single server that is always available."""

    api_key = "none is asked for"

    def __init__(self, url: str) -> None:
        self.urls: Sequence[str] = [url]

    def was_away(self, which: int, began: float, ended: float) -> bool:
        return False


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"] if LONG else ["sqlite"])
def test_a_soak(data: Path, kind: str, request: pytest.FixtureRequest) -> None:
    url = None if kind == "sqlite" else request.getfixturevalue("postgres").create("soak")
    figures = soak(Plan.of(1, 4) if LONG else SHORT, data, url)
    assert figures["wrong"] == []
    assert figures["answers"] > 50
    assert figures["killed"], "a server was killed"
    assert any("503" in burst for burst in figures["bursts"]), "more came than may wait"
    assert "| memory_mb |" in markdown({**figures, "machine": "", "commit": "", "date": "", "database": kind})


@pytest.fixture
def client(server: str, kith: Kith, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8]) -> Iterator[Client]:
    """Client that enrolled one photo into an otherwise empty gallery."""
    vector = np.asarray(l2_normalize(np.ones((1, kith.model().dimension))), np.float32)[0]
    mine, theirs = Known(jpeg(astronaut), vector), Known(jpeg(actor), vector)
    kith.create_gallery(PEOPLE)
    book = Book()
    with Asking(One(server), book, random.Random(0)) as ask:
        client = Client(0, ask, [mine], Photos([("fixed-0", theirs)], [], []))
        client.enroll_photo()
        client.identify_mine()
        assert book.wrong == []
        yield client
    kith.delete_gallery(PEOPLE)


def test_a_missing_subject_is_noticed(client: Client, kith: Kith) -> None:
    kith.delete_subject(PEOPLE, client.subjects[0].id)
    client.identify_mine()
    (wrong,) = client.book.wrong
    assert wrong.startswith("expected client-0-0, got unknown")


def test_a_reappearing_subject_is_noticed(client: Client, kith: Kith) -> None:
    (photo,) = client.subjects[0].templates.values()
    client.delete_subject()
    assert client.book.wrong == []
    assert isinstance(photo, bytes)
    kith.enroll(PEOPLE, "client-0-0", photo, face="largest")
    client.identify_gone()
    (wrong,) = client.book.wrong
    assert wrong.startswith("expected no subject, got identified, client-0-0")


def test_another_vector_is_noticed(client: Client) -> None:
    client.embed()
    (wrong,) = client.book.wrong
    assert wrong.startswith("a photo's vector is another than it was")


def test_a_server_that_lives_and_does_not_answer_is_wrong(client: Client) -> None:
    book = Book()
    with Asking(One("http://127.0.0.1:1"), book, random.Random(0)) as ask, pytest.raises(TimeoutError):
        ask("detect", lambda kith: kith.ready(), patience_s=0.2)
    assert "server 0 lived and did not answer" in book.wrong[0]


def test_growth_is_measured_after_the_warm_up() -> None:
    plan = replace(SHORT, rounds=6)
    held = [Reading(mb, 20, 30) for mb in (100, 200, 300, 310, 320, 330)]
    rises = judged_rises(plan, held)
    assert rises == pytest.approx({"memory_mb": 30, "descriptors": 0, "threads": 0})


def test_p99_is_of_each_third_after_the_warm_up() -> None:
    plan, book = replace(SHORT, rounds=9), Book()
    series = Series(rounds=[(float(i), i + 0.9) for i in range(9)])
    book.answers = [(i + 0.5, "identify", 0, 0.1 * (i + 1)) for i in range(9)]
    book.answers += [(i + 0.95, "identify", 0, 9.0) for i in range(9)] + [(0.5, "search", 0, 9.0)]
    assert [third["p50_ms"] for third in p99_of_thirds(plan, book, series)] == pytest.approx([450, 650, 850])

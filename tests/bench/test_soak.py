"""The soak test runs for seconds instead of half an hour, and detects faults."""

from __future__ import annotations

import random
from collections.abc import Sequence
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

pytestmark = pytest.mark.long

SHORT = Plan(rounds=2, round_s=3, clients=3, own=2, fixed=4, others=12, rest_s=0.5)


class One:
    """Single server that is always available."""

    api_key = "none is asked for"

    def __init__(self, url: str) -> None:
        self.urls: Sequence[str] = [url]

    def was_away(self, which: int, began: float, ended: float) -> bool:
        return False


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_soak(data: Path, kind: str, request: pytest.FixtureRequest) -> None:
    url = None if kind == "sqlite" else request.getfixturevalue("postgres").create("soak")
    figures = soak(SHORT, data, url)
    assert figures["wrong"] == []
    assert figures["answers"] > 50
    assert figures["killed"], "a server was killed"
    assert any("503" in burst for burst in figures["bursts"]), "more came than may wait"
    assert "| memory_mb |" in markdown({**figures, "machine": "", "commit": "", "date": "", "database": kind})


def test_wrong_answers_are_noticed(
    server: str, kith: Kith, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8]
) -> None:
    """Another vector than before, an erased subject that is back, a missing one, and a server that does not answer."""
    vector = np.asarray(l2_normalize(np.ones((1, kith.model().dimension))), np.float32)[0]
    mine, theirs = Known(jpeg(astronaut), vector), Known(jpeg(actor), vector)
    kith.create_gallery(PEOPLE)
    book = Book()
    with Asking(One(server), book, random.Random(0)) as ask:
        client = Client(0, ask, [mine], Photos([("fixed-0", theirs)], [], []))
        client.enroll_photo()
        client.identify_mine()
        assert book.wrong == []
        client.embed()
        (photo,) = client.subjects[0].templates.values()
        assert isinstance(photo, bytes)
        client.delete_subject()
        kith.enroll(PEOPLE, "client-0-0", photo, face="largest")
        client.identify_gone()
        kith.delete_subject(PEOPLE, "client-0-0")
        client.enroll_photo()
        kith.delete_subject(PEOPLE, "client-0-0")
        client.identify_mine()
    kith.delete_gallery(PEOPLE)
    with Asking(One("http://127.0.0.1:1"), book, random.Random(0)) as ask, pytest.raises(TimeoutError):
        ask("detect", lambda kith: kith.ready(), patience_s=0.2)
    wrong = (
        "a photo's vector is another than it was",
        "expected no subject, got identified, client-0-0",
        "expected client-0-0, got unknown",
        "server 0 lived and did not answer",
    )
    assert len(book.wrong) >= len(wrong)
    for expected in wrong:
        assert any(expected in said for said in book.wrong), expected


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

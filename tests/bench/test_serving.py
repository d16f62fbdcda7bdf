"""What is said of rounds: medians with their spread, rates by the seconds that count."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.load import Tally
from bench.serving import LOOP, System, cell, measure, spread


def test_spread() -> None:
    assert spread([3.0, 1.0, 10.0]) == {"median": 3.0, "min": 1.0, "max": 10.0}


def test_a_cell() -> None:
    tally = Tally(2.0, 30, [float(ms) for ms in range(1, 101)], Counter({200: 90, 503: 10}), 0.5)
    figures = cell(tally, 0.27, 200_000_000, 300_000_000)
    assert figures["photos_per_s"] == 45
    assert figures["faces_per_s"] == 15
    assert figures["p50_ms"] == pytest.approx(50.5)
    assert figures["failed"] == 10
    assert figures["generator_cores"] == 0.25
    assert figures["cpu_ms_per_photo"] == pytest.approx(1000 * 0.27 / 135)
    assert figures["rss_mb"] == 200


def test_nothing_answered_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="503"):
        cell(Tally(1.0, 0, [1.0], Counter({503: 1})), 0.1, 1, 1)


def test_systems_take_turns_and_ratios_are_of_a_round() -> None:
    import os

    turns: list[str] = []

    def system(name: str, rates: list[int]) -> System:
        def run(clients: int, seconds: float, warm_up_s: float) -> Tally:
            turns.append(name)
            rate = rates[turns.count(name) - 1]
            return Tally(1.0, rate, [1000 / rate] * rate, Counter({200: rate}))

        return System(name, os.getpid(), run)

    measured = measure([system("own", [1, 20, 60]), system(LOOP, [1, 10, 20])], 4, rounds=2, seconds=1.0)
    assert turns == ["own", LOOP] * 3
    assert measured["systems"]["own"]["photos_per_s"] == {"median": 40.0, "min": 20.0, "max": 60.0}
    assert measured["ratios"][f"own / {LOOP}"]["photos_per_s"] == {"median": 2.5, "min": 2.0, "max": 3.0}

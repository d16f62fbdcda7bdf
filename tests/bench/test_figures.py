"""Figures of benchmarks: medians of rounds with their spread, rates, and goals that are met or missed."""

from __future__ import annotations

import json
import math
import os

import pytest

from bench.accuracy import markdown
from bench.load import ProcessFigures, Tally
from bench.machine import commit, machine
from bench.serving import (
    LOOP,
    PAGE,
    RESULT,
    System,
    cell,
    measure,
    quoted,
    report,
)


def test_a_cell() -> None:
    tally = Tally(2.0, 30, 135, {200: [float(ms) for ms in range(1, 91)], 503: [0.1] * 10}, 0.5)
    figures = cell("Kith", tally, 0.27, ProcessFigures(1.0, 200_000_000, 300_000_000))
    assert figures["photos_per_s"] == 45
    assert figures["faces_per_s"] == 15
    assert figures["p50_ms"] == pytest.approx(45.5), "refusals are quick, and no latency of an answer"
    assert figures["failed"] == 10
    assert figures["generator_cores"] == 0.25
    assert figures["cpu_ms_per_photo"] == pytest.approx(1000 * 0.27 / 135)
    assert figures["rss_mb"] == 200
    figures = Tally(0.1, latencies_ms={503: [0.1]}).figures()  # of a window without an answer
    assert (figures["photos_per_s"], figures["failed"]) == (0, 1)
    assert math.isnan(figures["p99_ms"])


def test_systems_take_turns_and_ratios_are_of_a_round() -> None:
    turns: list[str] = []

    def system(name: str, rates: list[int]) -> System:
        def run(clients: int, seconds: float, warm_up_s: float) -> Tally:
            turns.append(name)
            rate = rates[turns.count(name) - 1]
            return Tally(1.0, rate, rate, {200: [1000 / rate] * rate})

        return System(name, os.getpid(), run, "detector openvino bf16" if name == "own" else None)

    measured = measure([system("own", [20, 60]), system(LOOP, [10, 20])], 4, rounds=2, seconds=1.0)
    assert turns == ["own", LOOP, LOOP, "own"], "each round another first"
    assert measured["networks"] == {"own": "detector openvino bf16"}
    assert (measured["commit"], measured["machine"]) == (commit(), machine())
    assert measured["systems"]["own"]["photos_per_s"] == {"median": 40.0, "min": 20.0, "max": 60.0}
    assert measured["ratios"][f"own / {LOOP}"]["photos_per_s"] == {"median": 2.5, "min": 2.0, "max": 3.0}


def test_the_readme_has_the_table() -> None:
    document = json.loads(RESULT.read_text())
    assert quoted(document) in PAGE.read_text()
    assert RESULT.with_suffix(".md").read_text() == report(document)


def test_goals_are_judged_against_the_figures() -> None:
    table = markdown({"ours": {"lfw_central_faces": {"photos": 1000, "found": 0.9995, "median_landmark_error": 0.05}}})
    for name, judged in (
        ("LFW central face found", ">= 99.9 %: met"),
        ("LFW median landmark error", "<= 4 %: missed"),
        ("WIDER val recall at precision 95 %", ">= 90 %: not measured"),
    ):
        assert [line for line in table.splitlines() if name in line and line.endswith(f"| {judged} |")], name

"""Progress says how far a run is, how well it does and how long it takes, on a terminal and in a file."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from training.progress import RunProgress, track

VALUES = {"loss": 4.25, "learning_rate": 0.09, "scale": 20.0, "target_angle_deg": 61.4, "accuracy": 0.125, "other": 1.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds."""
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def test_a_file_gets_a_line_now_and_then_and_at_the_end(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    caplog.set_level(logging.INFO)
    shown = RunProgress(20, 100, 10, 8)
    for step in range(21, 101):
        clock[0] += 1.0
        shown.update(step, VALUES)
    shown.close()
    lines = [record.message for record in caplog.records]
    assert [re.findall(r"step (\d+)/100", line) for line in lines] == [["20"], ["50"], ["80"], ["100"]]
    assert (
        lines[1] == "epoch 5/10, step 50/100, 00:50 left, rate 0.09, loss 4.25, angle 61°, accuracy 12.5%,  8.00img/s"
    )
    assert "00:00 left" in lines[3]
    caplog.clear()
    RunProgress(0, 1, 1, 8, silent=True).update(1, VALUES)
    assert not caplog.records


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    shown = RunProgress(0, 12, 3, 8)
    for step in range(1, 13):
        shown.update(step, VALUES)
    shown.close()
    last = screen.getvalue().split("\r")[-1]
    line = r"epoch 4/4, step 12/12, 00:00 left, rate 0\.09, loss 4\.25, angle 61°, accuracy 12\.5%, +[\d.]+k?img/s"
    assert re.match(line, last), last
    assert screen.getvalue().count("\n") <= 1


def test_long_work_logs_a_line_now_and_then(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    caplog.set_level(logging.INFO)
    assert list(track(range(5), "detect", "photos")) == list(range(5))
    assert not caplog.records
    for _ in track(iter(range(100)), "detect", "photos", 100):
        clock[0] += 1.0
    left = {30: "01:10", 60: "00:40", 90: "00:10", 100: "00:00"}
    assert [record.message for record in caplog.records] == [
        f"detect: {done} of 100 photos, {rest} left" for done, rest in left.items()
    ]

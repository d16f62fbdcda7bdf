"""Progress says how far a run is, how well it does and how long it takes, on a terminal and in a file."""

from __future__ import annotations

import io
import logging
import re
import sys
import time

import pytest
import torch
from torch.nn import functional as F

from training.config import HeadConfig
from training.losses import HEADS, PartialFC, build_head
from training.optimization.progress import Progress
from training.progress import track

VALUES = {"loss": 4.25, "learning_rate": 0.09, "scale": 20.0, "target_angle_deg": 61.4, "accuracy": 0.125, "other": 1.0}


def test_a_file_gets_a_line_now_and_then_and_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO, Progress.__module__)
    shown = Progress(20, 100, 10, 8)
    for step in range(21, 101):
        now += 1.0
        shown.update(step, VALUES)
    shown.close()
    lines = [record.message for record in caplog.records]
    assert [re.findall(r"step (\d+)/100", line) for line in lines] == [["40"], ["70"], ["100"]]
    expected = "epoch 4/10, step 40/100, 01:00 left, rate 0.09, loss 4.25, angle 61°, accuracy 12.5%, 8img/s"
    assert lines[0] == expected
    assert "00:00 left" in lines[2]
    caplog.clear()
    Progress(0, 1, 1, 8, silent=True).update(1, VALUES)
    assert not caplog.records


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    shown = Progress(0, 12, 3, 8)
    for step in range(1, 13):
        shown.update(step, VALUES)
    shown.close()
    last = screen.getvalue().split("\r")[-1]
    line = r"epoch 4/4, step 12/12, 00:00 left, rate 0\.09, loss 4\.25, angle 61°, accuracy 12\.5%, +[\d.]+k?img/s"
    assert re.match(line, last), last
    assert screen.getvalue().count("\n") <= 1


def test_long_work_logs_a_line_now_and_then(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO, "training.progress")
    assert list(track(range(5), "detect", "photos")) == list(range(5))
    assert not caplog.records
    for _ in track(iter(range(100)), "detect", "photos", 100):
        now += 1.0
    lines = [record.message for record in caplog.records]
    assert lines == [
        f"detect: {n} of 100 photos, {left} left" for n, left in ((30, "01:10"), (60, "00:40"), (90, "00:10"))
    ]


@pytest.mark.parametrize("name", sorted(HEADS.keys() - {"coco", "agents", "none"}))
def test_accuracy_is_the_share_of_highest_logits_without_margin(name: str) -> None:
    torch.manual_seed(3)
    head = build_head(HeadConfig(name), 16, 12).train()
    labels = torch.randint(12, (40,))
    weights = head.class_weights()
    assert weights is not None
    embeddings = F.normalize(weights.detach()[labels]) + 0.5 * torch.randn(40, 16)
    head(embeddings, labels)
    assert head.accuracy is not None
    if name in ("softmax", "softmax_no_bias", "l_softmax"):  # weights of other lengths
        scores = embeddings @ weights.T
    else:
        scores = F.normalize(embeddings) @ F.normalize(weights).T
    bias = head.get_parameter("classifier.bias") if name in ("softmax", "l2_softmax") else 0.0
    if name == "l2_softmax":
        scores = head.get_buffer("alpha") * F.normalize(embeddings) @ weights.T
    if name == "subcenter_arcface":
        scores = (F.normalize(embeddings) @ F.normalize(head.get_parameter("weight")).T).view(40, 12, -1).amax(2)
    right = float(((scores + bias).argmax(1) == labels).float().mean())
    assert 0.05 < right < 0.95
    assert float(head.accuracy) == pytest.approx(right)


def test_split_classes_have_the_accuracy_of_all() -> None:
    torch.manual_seed(3)
    whole = build_head(HeadConfig("cosface"), 16, 12).train()
    torch.manual_seed(3)
    split = PartialFC(build_head(HeadConfig("cosface"), 16, 12), 1.0).train()  # type: ignore[arg-type]
    labels, embeddings = torch.randint(12, (40,)), torch.randn(40, 16)
    for head in (whole, split):
        head(embeddings, labels)
    assert whole.accuracy is not None
    assert split.accuracy is not None
    assert float(split.accuracy) == float(whole.accuracy)

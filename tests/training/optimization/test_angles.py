"""What a head logs of a batch: its accuracy, and its angles to the own class and to others, counted in windows."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from training.config import HeadConfig
from training.losses import HEADS, build_head
from training.losses.core import MAX_OTHER_CLASSES
from training.losses.partial_fc import PartialFC
from training.optimization.logs import ANGLE_BINS
from training.optimization.monitor import angle_window, count_angles, measure_embeddings

CLASSES, DIM = 12, 8


@pytest.mark.parametrize("name", [name for name in HEADS if name not in ("none", "coco", "agents")])
def test_angles_and_accuracy_of_a_batch(name: str) -> None:
    """The accuracy is the share of samples whose class has the highest logit without margin."""
    torch.manual_seed(3)
    head = build_head(HeadConfig(name), DIM, CLASSES).train()
    weights, labels = head.class_weights(), torch.randint(CLASSES, (40,))
    assert weights is not None
    x = F.normalize(weights.detach()[labels]) + 0.5 * torch.randn(40, DIM)
    head(x, labels)
    cosines = (F.normalize(x) @ F.normalize(weights).T).detach()
    scores = cosines
    if name in ("softmax", "softmax_no_bias", "l_softmax"):  # weights of other lengths
        scores = x @ weights.T
    elif name == "l2_softmax":
        scores = head.get_buffer("alpha") * F.normalize(x) @ weights.T
    elif name == "subcenter_arcface":
        centers = F.normalize(head.get_parameter("weight"))
        scores = (F.normalize(x) @ centers.T).view(40, CLASSES, -1).amax(2)
    if name in ("softmax", "l2_softmax"):
        scores = scores + head.get_parameter("classifier.bias")
    right = float((scores.argmax(1) == labels).float().mean())
    measured = measure_embeddings(head, x, labels)
    assert 0.05 < right < 0.95
    assert float(measured["accuracy"]) == pytest.approx(right)
    if name == "subcenter_arcface":  # which has several angles to a class
        return
    angles = [[math.degrees(math.acos(c)) for c in row] for row in cosines.tolist()]
    own = [angles[i][label] for i, label in enumerate(labels.tolist())]
    others = [a for i, label in enumerate(labels.tolist()) for j, a in enumerate(angles[i]) if j != label]
    assert float(measured["target_angle_deg"]) == pytest.approx(sum(own) / len(own), abs=1e-2)
    assert float(measured["other_angle_deg"]) == pytest.approx(sum(others) / len(others), abs=1e-2)
    counts = count_angles(head, x, labels)
    assert counts is not None
    width = 180 / ANGLE_BINS
    for row, values in zip(counts.tolist(), (own, others), strict=True):
        assert row == [sum(int(value // width) == i for value in values) for i in range(ANGLE_BINS)]


def test_many_classes_are_sampled_evenly() -> None:
    head = build_head(HeadConfig("cosface"), 4, 3 * MAX_OTHER_CLASSES)
    angles = head.angles_deg(torch.randn(2, 4), torch.tensor([0, 1]))
    assert angles is not None
    assert angles[1].shape == (2, MAX_OTHER_CLASSES)
    # Class 0 is among the sampled classes, class 1 is not.
    assert angles[1].isnan().sum(1).tolist() == [1, 0]


def test_heads_that_hold_no_or_some_classes_have_no_angles() -> None:
    x, labels = torch.randn(4, DIM), torch.tensor([0, 0, 1, 1])
    torch.manual_seed(3)
    whole = build_head(HeadConfig("cosface"), DIM, CLASSES).train()
    torch.manual_seed(3)
    split = PartialFC(build_head(HeadConfig("cosface"), DIM, CLASSES), 1.0).train()  # type: ignore[arg-type]
    for head in (build_head(HeadConfig("none"), DIM, CLASSES), build_head(HeadConfig("coco"), DIM, CLASSES), split):
        assert count_angles(head, x, labels) is None
        assert "other_angle_deg" not in measure_embeddings(head, x, labels)
    for head in (whole, split):
        head(x, labels)
    assert whole.accuracy is not None and split.accuracy is not None
    assert float(split.accuracy) == float(whole.accuracy)


@pytest.mark.parametrize(("total", "size"), [(3, 1), (12, 1), (400, 8), (100_000, 50)])
def test_windows_are_the_start_middle_and_end(total: int, size: int) -> None:
    names = ("start", "middle", "end")
    windows = {name: [s for s in range(1, total + 1) if angle_window(s, total) == name] for name in names}
    assert {name: len(steps) for name, steps in windows.items()} == dict.fromkeys(names, size)
    assert windows["start"][0] == 1
    assert windows["end"][-1] == total
    assert sum(windows["middle"]) / size == pytest.approx((total + 1) / 2, abs=0.5)

"""The angles of a run: to the own class and to others, logged in every step and counted in three windows."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from training.config import HeadConfig
from training.losses import HEADS, PartialFC, build_head
from training.losses.core import MAX_OTHER_CLASSES
from training.optimization.logs import ANGLE_BINS
from training.optimization.monitor import angle_window, count_angles, measure_embeddings

CLASSES, DIM = 12, 8


@pytest.mark.parametrize("name", [name for name in HEADS if name not in ("none", "coco", "subcenter_arcface")])
def test_angles_to_the_own_class_and_to_others(name: str) -> None:
    torch.manual_seed(3)
    head = build_head(HeadConfig(name), DIM, CLASSES)
    weights = head.class_weights()
    assert weights is not None
    x, labels = torch.randn(5, DIM), torch.tensor([0, 3, 3, 7, 11])
    cosines = (F.normalize(x) @ F.normalize(weights).T).detach()
    angles = [[math.degrees(math.acos(c)) for c in row] for row in cosines.tolist()]
    own = [angles[i][label] for i, label in enumerate(labels.tolist())]
    others = [a for i, label in enumerate(labels.tolist()) for j, a in enumerate(angles[i]) if j != label]

    measured = measure_embeddings(head, x, labels)
    assert float(measured["target_angle_deg"]) == pytest.approx(sum(own) / len(own), abs=1e-2)
    assert float(measured["other_angle_deg"]) == pytest.approx(sum(others) / len(others), abs=1e-2)

    counts = count_angles(head, x, labels)
    assert counts is not None
    assert counts.sum(1).tolist() == [len(own), len(others)]
    width = 180 / ANGLE_BINS
    for row, values in zip(counts.tolist(), (own, others), strict=True):
        expected = [0] * ANGLE_BINS
        for value in values:
            expected[int(value // width)] += 1
        assert row == expected


def test_many_classes_are_sampled_evenly() -> None:
    head = build_head(HeadConfig("cosface"), 4, 3 * MAX_OTHER_CLASSES)
    angles = head.angles_deg(torch.randn(2, 4), torch.tensor([0, 1]))
    assert angles is not None
    assert angles[1].shape == (2, MAX_OTHER_CLASSES)
    # Class 0 is among the sampled classes, class 1 is not.
    assert angles[1].isnan().sum(1).tolist() == [1, 0]


def test_heads_without_class_weights_have_no_angles() -> None:
    x, labels = torch.randn(4, DIM), torch.tensor([0, 0, 1, 1])
    sharded = PartialFC(build_head(HeadConfig("cosface"), DIM, CLASSES), 0.5)  # type: ignore[arg-type]
    for head in (build_head(HeadConfig("none"), DIM, CLASSES), build_head(HeadConfig("coco"), DIM, CLASSES), sharded):
        assert count_angles(head, x, labels) is None
        assert "other_angle_deg" not in measure_embeddings(head, x, labels)


@pytest.mark.parametrize(("total", "size"), [(3, 1), (12, 1), (400, 8), (100_000, 50)])
def test_windows_are_the_start_middle_and_end(total: int, size: int) -> None:
    names = ("start", "middle", "end")
    windows = {name: [s for s in range(1, total + 1) if angle_window(s, total) == name] for name in names}
    assert {name: len(steps) for name, steps in windows.items()} == dict.fromkeys(names, size)
    assert windows["start"][0] == 1
    assert windows["end"][-1] == total
    assert sum(windows["middle"]) / size == pytest.approx((total + 1) / 2, abs=0.5)

"""AdaCos follows its paper, its floor and its numerical limits."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from tests.training.losses import derivations as paper
from tests.training.losses.test_losses import BATCH, CLASSES, DIM
from training.bounds import fixed_scale
from training.losses import AdaCos


@pytest.mark.parametrize("count", [BATCH, 12, 2, 1])
def test_adacos_follows_equations_15_and_16(rng: np.random.Generator, count: int) -> None:
    built = AdaCos(DIM, CLASSES)
    x, y = rng.normal(size=(count, DIM)), rng.integers(CLASSES, size=count)
    s = fixed_scale(CLASSES)
    for _ in range(3):
        w = built.weight.detach().double().numpy()
        cosines = [[paper.cosine(v, k) for k in w] for v in x]
        others = [
            sum(math.exp(s * c) for k, c in enumerate(row) if k != label) for row, label in zip(cosines, y, strict=True)
        ]
        median = statistics.median(math.acos(cosines[i][label]) for i, label in enumerate(y))
        s = max(1.0, math.log(paper.mean(others)) / math.cos(min(math.pi / 4, median)))
        built(torch.from_numpy(x).float(), torch.from_numpy(y))
        assert float(built.scale) == pytest.approx(s, rel=1e-4)


def test_adacos_does_not_move_in_evaluation_and_passes_no_gradient(rng: np.random.Generator) -> None:
    built = AdaCos(DIM, CLASSES)
    x, y = torch.from_numpy(rng.normal(size=(BATCH, DIM))).float(), torch.zeros(BATCH, dtype=torch.long)
    built(x, y)
    moved = float(built.scale)
    assert moved != pytest.approx(fixed_scale(CLASSES))
    assert not built.scale.requires_grad
    built.eval()
    built(x * -1, y)
    assert float(built.scale) == moved


def test_adacos_survives_scales_that_overflow_exp() -> None:
    built = AdaCos(DIM, CLASSES)
    built.scale.fill_(1000.0)
    x = built.weight.detach()[:2] * 100
    assert torch.isfinite(built(x, torch.tensor([1, 0])))
    assert torch.isfinite(built.scale)


def test_adacos_never_falls_below_its_floor() -> None:
    built = AdaCos(DIM, 3)
    with torch.no_grad():
        built.weight.copy_(torch.tensor([[1.0, 0, 0, 0, 0], [-1, 0.1, 0, 0, 0], [-1, -0.1, 0, 0, 0]]))
    for _ in range(5):
        assert torch.isfinite(built(built.weight.detach()[:1], torch.tensor([0])))
    assert float(built.scale) == 1.0

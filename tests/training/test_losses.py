"""Heads agree with float64 derivations from the papers, in value and gradient, also where arccos has none."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from training.losses import AdaCos, ArcFace, CosFace, CosineHead, NormFace
from training.losses.adacos import fixed_scale
from training.losses.margins import Beyond

CLASSES, DIM, BATCH = 7, 5, 6
Margin = Callable[[float], float]


def expected_loss(x: NDArray[np.float64], w: NDArray[np.float64], y: NDArray[np.int64], s: float, m: Margin) -> float:
    """Cross-entropy written out, one sample at a time; ``m`` maps the target's angle to its new cosine."""
    losses = []
    for row, label in zip(x, y, strict=True):
        cosines = [float(row @ v / (np.linalg.norm(row) * np.linalg.norm(v))) for v in w]
        cosines[label] = m(math.acos(cosines[label]))
        top = max(s * c for c in cosines)
        total = sum(math.exp(s * c - top) for c in cosines)
        losses.append(math.log(total) + top - s * cosines[label])
    return float(np.mean(losses))


def arc(m: float, beyond: Beyond) -> Margin:
    def target(theta: float) -> float:
        if beyond == "easy":
            return math.cos(theta + m) if theta < math.pi / 2 else math.cos(theta)
        if theta < math.pi - m:
            return math.cos(theta + m)
        return math.cos(theta) - (m * math.sin(m) if beyond == "linear" else 1 - math.cos(m))

    return target


CASES: list[tuple[str, Callable[[], CosineHead], float, Margin]] = [
    ("normface", lambda: NormFace(DIM, CLASSES, 20.0), 20.0, math.cos),
    ("cosface", lambda: CosFace(DIM, CLASSES, 16.0, 0.35), 16.0, lambda t: math.cos(t) - 0.35),
    ("arcface linear", lambda: ArcFace(DIM, CLASSES, 16.0, 0.5, "linear"), 16.0, arc(0.5, "linear")),
    ("arcface easy", lambda: ArcFace(DIM, CLASSES, 16.0, 0.5, "easy"), 16.0, arc(0.5, "easy")),
    ("arcface continuous", lambda: ArcFace(DIM, CLASSES, 16.0, 0.5, "continuous"), 16.0, arc(0.5, "continuous")),
    ("adacos fixed", lambda: AdaCos(DIM, CLASSES, dynamic=False), fixed_scale(CLASSES), math.cos),
]


@pytest.mark.parametrize(("make", "s", "margin"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_value_and_gradient(make: Callable[[], CosineHead], s: float, margin: Margin, rng: np.random.Generator) -> None:
    head = make()
    w = rng.normal(size=(CLASSES, DIM))
    x = rng.normal(size=(BATCH, DIM))
    y = rng.integers(CLASSES, size=BATCH)
    # One sample beyond theta = pi - m, one near 0: both sides of every boundary.
    x[0] = -w[y[0]] + 0.1 * rng.normal(size=DIM)
    x[1] = w[y[1]] + 0.1 * rng.normal(size=DIM)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(w))
    inputs = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    loss = head(inputs, torch.from_numpy(y))
    assert loss.item() == pytest.approx(expected_loss(x, w, y, s, margin), rel=1e-4)
    loss.backward()
    assert inputs.grad is not None
    step = 1e-5
    for i in range(BATCH):
        for j in range(DIM):
            up, down = x.copy(), x.copy()
            up[i, j] += step
            down[i, j] -= step
            slope = (expected_loss(up, w, y, s, margin) - expected_loss(down, w, y, s, margin)) / (2 * step)
            assert float(inputs.grad[i, j]) == pytest.approx(slope, abs=2e-3, rel=2e-3)


@pytest.mark.parametrize("make", [case[1] for case in CASES], ids=[case[0] for case in CASES])
@pytest.mark.parametrize("angle", [0.0, 1e-4, math.pi - 0.5, math.pi - 1e-4, math.pi])
def test_gradients_are_finite_where_arccos_has_none(make: Callable[[], CosineHead], angle: float) -> None:
    head = make()
    with torch.no_grad():
        head.weight.zero_()
        head.weight[:, 2] = 1.0
        head.weight[0] = torch.tensor([1.0, 0, 0, 0, 0])
    x = torch.tensor([[math.cos(angle), math.sin(angle), 0, 0, 0]], requires_grad=True)
    loss = head(x, torch.tensor([0]))
    loss.backward()
    assert x.grad is not None
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()
    assert head.weight.grad is not None
    assert torch.isfinite(head.weight.grad).all()


def test_the_continuous_arc_has_no_jump_and_the_linear_one_does() -> None:
    m = 0.5
    edge = math.cos(math.pi - m)
    both = torch.tensor([edge - 1e-5, edge + 1e-5])
    smooth = ArcFace(DIM, CLASSES, 1.0, m, "continuous").target_cosines(both)
    jumps = ArcFace(DIM, CLASSES, 1.0, m, "linear").target_cosines(both)
    assert abs(float(smooth[1] - smooth[0])) < 1e-3
    assert abs(float(jumps[1] - jumps[0])) > 0.1


def test_margins_survive_bf16_autocast(rng: np.random.Generator) -> None:
    head = ArcFace(DIM, CLASSES)
    x = torch.from_numpy(rng.normal(size=(BATCH, DIM))).float()
    y = torch.from_numpy(rng.integers(CLASSES, size=BATCH))
    exact = head(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        cast = head(x.bfloat16().float(), y)
    assert cast.dtype == torch.float32
    assert cast.item() == pytest.approx(exact.item(), rel=0.02)


def test_adacos_starts_at_the_papers_scale() -> None:
    assert fixed_scale(10_575) == pytest.approx(13.10, abs=0.01)
    assert float(AdaCos(DIM, 10_575).scale) == pytest.approx(13.10, abs=0.01)


def test_adacos_follows_equations_15_and_16(rng: np.random.Generator) -> None:
    head = AdaCos(DIM, CLASSES)
    x, y = rng.normal(size=(BATCH, DIM)), rng.integers(CLASSES, size=BATCH)
    s = fixed_scale(CLASSES)
    for _ in range(3):
        w = head.weight.detach().double().numpy()
        cosines = (x / np.linalg.norm(x, axis=1, keepdims=True)) @ (w / np.linalg.norm(w, axis=1, keepdims=True)).T
        others = [
            sum(math.exp(s * c) for k, c in enumerate(row) if k != label) for row, label in zip(cosines, y, strict=True)
        ]
        angles = sorted(math.acos(cosines[i, label]) for i, label in enumerate(y))
        median = angles[(BATCH - 1) // 2]  # torch's median of an even count is the lower one
        s = max(1.0, math.log(float(np.mean(others))) / math.cos(min(math.pi / 4, median)))
        head(torch.from_numpy(x).float(), torch.from_numpy(y))
        assert float(head.scale) == pytest.approx(s, rel=1e-4)


def test_adacos_does_not_move_in_evaluation_and_is_saved(rng: np.random.Generator) -> None:
    head = AdaCos(DIM, CLASSES)
    x, y = torch.from_numpy(rng.normal(size=(BATCH, DIM))).float(), torch.zeros(BATCH, dtype=torch.long)
    head(x, y)
    moved = float(head.scale)
    assert moved != pytest.approx(fixed_scale(CLASSES))
    head.eval()
    head(x * -1, y)
    assert float(head.scale) == moved
    other = AdaCos(DIM, CLASSES)
    other.load_state_dict(head.state_dict())
    assert float(other.scale) == moved
    assert not head.scale.requires_grad


def test_adacos_survives_scales_that_overflow_exp() -> None:
    head = AdaCos(DIM, CLASSES)
    head.scale.fill_(1000.0)
    x = head.weight.detach()[:2] * 100
    assert torch.isfinite(head(x, torch.tensor([1, 0])))
    assert torch.isfinite(head.scale)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CosFace(DIM, 1),
        lambda: NormFace(DIM, CLASSES, -1.0),
        lambda: ArcFace(DIM, CLASSES, margin=4.0),
        lambda: CosFace(DIM, CLASSES, margin=-0.1),
        lambda: AdaCos(DIM, 2),
        lambda: ArcFace(DIM, CLASSES, beyond="sideways"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], CosineHead]) -> None:
    with pytest.raises(ValueError, match=r"."):
        make()

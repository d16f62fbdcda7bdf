"""Heads and terms match their papers in value and gradient, derived independently in float64, also at the edges of
arccos."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.training.losses import derivations as paper
from training.bounds import fixed_scale, l2_softmax_alpha_bound
from training.config import ConfigError, HeadConfig, TermConfig
from training.losses import HEADS, TERMS, build_head, build_term
from training.losses.adaptive import AdaCos, AdaFace, CurricularFace, ElasticFace
from training.losses.core import CosineHead, Head
from training.losses.partial_fc import PartialFC
from training.losses.softmax import ASoftmax, LSoftmax

CLASSES, DIM, BATCH = 7, 5, 9
S = 8.0


def head(name: str, **options: Any) -> Head:
    return build_head(HeadConfig(name, options), DIM, CLASSES)


def term(name: str, **options: Any) -> nn.Module:
    return build_term(TermConfig(name, 1.0, options), head("cosface"), DIM, CLASSES)


HeadCase = tuple[Callable[[], Head], paper.Derivation]
TermCase = tuple[Callable[[], nn.Module], paper.Derivation]


def head_case(expected: paper.Derivation, name: str, **options: Any) -> HeadCase:
    return partial(head, name, **options), expected


def cosine_case(target: paper.Target, name: str, scale: float = S, **options: Any) -> HeadCase:
    return head_case(paper.cosine_head(scale, target), name, scale=scale, **options)


def term_case(expected: paper.Derivation, name: str, **options: Any) -> TermCase:
    return partial(term, name, **options), expected


def cosface(margin: float) -> paper.Target:
    return lambda theta, _: math.cos(theta) - margin


BIAS = np.arange(CLASSES) / 8


def biased(name: str, **options: Any) -> Head:
    built = head(name, **options)
    built.get_parameter("classifier.bias").data.copy_(torch.from_numpy(BIAS))
    return built


def softmax(length: float | None = None, bias: NDArray[np.float64] = BIAS) -> paper.Derivation:
    def loss(x: NDArray[np.float64], w: NDArray[np.float64], y: NDArray[np.int64]) -> float:
        v = [row if length is None else length * row / paper.length(row) for row in x]
        return paper.softmax_over(x, y, lambda i, j: float(v[i] @ w[j]) + bias[j], len(w))

    return loss


def filtered() -> Head:
    built = head("cosface", scale=S)
    assert isinstance(built, CosineHead)
    built.interclass_filter = 0.5
    return built


def without_near_classes(x: NDArray[np.float64], w: NDArray[np.float64], y: NDArray[np.int64]) -> float:
    def logit(i: int, j: int) -> float:
        c = paper.cosine(x[i], w[j])
        return S * (c - 0.35 if j == y[i] else 0.0 if c > 0.5 else c)

    return paper.softmax_over(x, y, logit, len(w))


FIXED = math.sqrt(2) * math.log(CLASSES - 1)
AT_60_DEG = float(np.float32(2 * math.log(CLASSES - 1)))
HEAD_CASES: dict[str, HeadCase] = {
    "normface": cosine_case(cosface(0), "normface"),
    "normface learned scale": cosine_case(cosface(0), "normface", learn_scale=True),
    "softmax": (partial(biased, "softmax"), softmax()),
    "softmax_no_bias": head_case(softmax(bias=0 * BIAS), "softmax_no_bias"),
    "l2_softmax": (partial(biased, "l2_softmax", alpha=3.0), softmax(3.0)),
    "l2_softmax of a bound": (partial(biased, "l2_softmax"), softmax(l2_softmax_alpha_bound(CLASSES, 0.9))),
    "coco": head_case(paper.batch_centroids(S), "coco", scale=S),
    "cosface": cosine_case(cosface(0.35), "cosface", margin=0.35),
    "cosface filtered": (filtered, without_near_classes),
    "adaptive_cosface": head_case(paper.cosine_head(FIXED, cosface(0.2)), "adaptive_cosface", margin=0.2),
    "adaptive_cosface at 60 degrees": head_case(
        paper.cosine_head(AT_60_DEG, cosface(0.2)), "adaptive_cosface", margin=0.2, angle_deg=60.0
    ),
    "adacos_fixed": head_case(paper.cosine_head(FIXED, cosface(0)), "adacos_fixed"),
    "arcface linear": cosine_case(paper.arc(0.5), "arcface"),
    "arcface easy": cosine_case(paper.arc(0.5, "easy"), "arcface", beyond="easy"),
    "arcface continuous": cosine_case(paper.arc(0.5, "continuous"), "arcface", beyond="continuous"),
    "sphereface": cosine_case(paper.combined(1.35, 0, 0), "sphereface"),
    "sphereface plain": cosine_case(paper.combined(1.35, 0, 0, "plain"), "sphereface", beyond="plain"),
    "cm1": cosine_case(paper.combined(1, 0.3, 0.2), "cm1"),
    "cm2": cosine_case(paper.combined(0.9, 0.4, 0.15), "cm2"),
    "combined plain": cosine_case(
        paper.combined(1.2, 0.5, 0.1, "plain"), "combined", m1=1.2, m2=0.5, m3=0.1, beyond="plain"
    ),
    "a_softmax": head_case(paper.multiplicative(4, 0.0, True), "a_softmax", lambda_min=0.0),
    "a_softmax eased": head_case(paper.multiplicative(3, 20, True), "a_softmax", margin=3, lambda_min=20.0),
    "l_softmax": head_case(paper.multiplicative(2, 0.0, False), "l_softmax", lambda_min=0.0, margin=2),
    "magface": head_case(paper.magface(S, 1.0, 3.0, 0.45, 0.8, 35.0), "magface", scale=S, l_a=1.0, u_a=3.0),
    "subcenter_arcface": head_case(paper.subcenter(S, 0.5, 3), "subcenter_arcface", scale=S, centers=3),
    "elasticface without spread": cosine_case(paper.arc(0.5), "elasticface", sigma=0.0),
    "elasticface cosine": cosine_case(cosface(0.35), "elasticface", sigma=0.0, kind="cos", margin=0.35),
}
TERM_CASES: dict[str, TermCase] = {
    "intra": term_case(paper.intra, "intra"),
    "inter": term_case(paper.inter, "inter"),
    "mhe": term_case(paper.energy(2.0), "mhe"),
    "mhe logarithmic": term_case(paper.energy(0.0), "mhe", power=0.0),
    "class_contrastive": term_case(paper.agents(1.0, False), "class_contrastive"),
    "class_contrastive wide": term_case(paper.agents(3.0, False), "class_contrastive", margin=3.0),
    "class_triplet": term_case(paper.agents(0.8, True), "class_triplet"),
    "triplet": term_case(paper.triplet(0.35, "semi_hard"), "triplet"),
    "triplet all": term_case(paper.triplet(0.35, "all"), "triplet", mining="all"),
    "contrastive": term_case(paper.contrastive(1.0, True), "contrastive"),
    "contrastive raw": term_case(paper.contrastive(2.0, False), "contrastive", normalized=False, margin=2.0),
    "range": term_case(paper.ranges(2, 9.0, 1.0, 0.5), "range", margin=9.0, beta=0.5),
    "ring": term_case(lambda x, w, y: paper.mean([0.5 * (paper.length(v) - 2) ** 2 for v in x]), "ring", radius=2.0),
    "center": term_case(lambda x, w, y: paper.mean([0.5 * paper.length(v) ** 2 for v in x]), "center"),
}


@pytest.fixture
def batch(rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Embeddings, three rows of weights a class (sub-centers need them) and labels; some people twice, one sample
    near its center, one opposite of it."""
    w = rng.normal(size=(3 * CLASSES, DIM))
    y = np.array([0, 1, 2, 3, 3, 0, 4, 5, 5])
    x = rng.normal(size=(BATCH, DIM))
    x[0] = 1.3 * w[y[0]] + 0.1 * rng.normal(size=DIM)
    x[1] = -w[y[1]] + 0.1 * rng.normal(size=DIM)
    return x, w, y


def weights_of(built: Head) -> nn.Parameter | None:
    """Return the class weights; None for a head without any."""
    return next((p for p in built.parameters() if p.ndim == 2), None)


def with_weights(built: Head, w: NDArray[np.float64]) -> Head:
    """Give a head the first of these weights."""
    if (weight := weights_of(built)) is not None:
        weight.data.copy_(torch.from_numpy(w[: len(weight)]))
    return built


def match_paper(built: nn.Module, expected: paper.Derivation, batch: Any) -> None:
    """Compare value and gradients of a head or term with a derivation."""
    x, w, y = batch
    built.double().zero_grad()
    inputs = torch.tensor(x, requires_grad=True)
    weights: Tensor | None
    if isinstance(built, Head):
        weights = weights_of(with_weights(built, w))
        loss = built(inputs, torch.from_numpy(y))
    else:
        weights = torch.tensor(w[:CLASSES], requires_grad=True)
        loss = built(inputs, torch.from_numpy(y), weights)
    w = w[: CLASSES if weights is None else len(weights)]
    assert loss.item() == pytest.approx(expected(x, w, y), rel=1e-9)
    loss.backward()
    for tensor, at, of in ((inputs, x, lambda v: expected(v, w, y)), (weights, w, lambda v: expected(x, v, y))):
        if tensor is not None:
            gradient = np.zeros_like(at) if tensor.grad is None else tensor.grad.numpy()
            np.testing.assert_allclose(gradient, paper.slope(of, at), atol=1e-6, rtol=1e-5)


CASES: dict[str, tuple[Callable[[], nn.Module], paper.Derivation]] = {**HEAD_CASES, **TERM_CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_head_or_term_matches_its_paper(name: str, batch: Any) -> None:
    make, expected = CASES[name]
    match_paper(make(), expected, batch)


def test_every_head_and_term_is_tested() -> None:
    elsewhere = {"adacos", "curricularface", "adaface", "none", "agents"}
    assert {name.split()[0] for name in HEAD_CASES} | elsewhere == set(HEADS)
    assert {name.split()[0] for name in TERM_CASES} == set(TERMS)


def test_a_learned_scale_has_its_gradient_and_is_not_split(batch: Any) -> None:
    x, w, y = batch
    built = with_weights(head("normface", scale=S, learn_scale=True).double(), w)
    built(torch.from_numpy(x), torch.from_numpy(y)).backward()
    (scale,) = (p for p in built.parameters() if p.ndim == 0)

    def loss(s: NDArray[np.float64]) -> float:
        return paper.cosine_head(float(s[0]), lambda t, _: math.cos(t))(x, w[:CLASSES], y)

    assert scale.grad is not None
    assert scale.grad.item() == pytest.approx(paper.slope(loss, np.array([S]))[0], rel=1e-6)
    with pytest.raises(ValueError, match="cannot be split"):
        PartialFC(built, 1.0)  # type: ignore[arg-type]


def test_curricularface_and_its_t(batch: Any) -> None:
    x, w, y = batch
    built, t = CurricularFace(DIM, CLASSES, scale=S, margin=0.3, momentum=0.5), 0.0
    for _ in range(3):
        t = 0.5 * t + 0.5 * paper.mean([paper.cosine(v, w[k]) for v, k in zip(x, y, strict=True)])
        match_paper(built, paper.curricular(S, 0.3, t), batch)
        assert float(built.t) == pytest.approx(t)
    built.eval()
    built(torch.from_numpy(x), torch.from_numpy(y))
    assert float(built.t) == pytest.approx(t)


@pytest.mark.parametrize("h", [0.333, 50.0], ids=["inside", "clipped"])
def test_adaface_and_its_statistics(h: float, batch: Any) -> None:
    x, w, y = batch
    x[0], x[1] = 3.0 * w[y[0]] + 0.02 * x[2], 0.1 * x[1]
    built = AdaFace(DIM, CLASSES, scale=S, alpha=0.5, h=h)
    lengths = [paper.length(v) for v in x]
    average, spread = 20.0, 100.0
    for _ in range(4):
        average = 0.5 * average + 0.5 * paper.mean(lengths)
        spread = 0.5 * spread + 0.5 * float(np.std(lengths, ddof=1))
        q = [max(-1.0, min(1.0, h * (a - average) / (spread + 1e-3))) for a in lengths]
        match_paper(built, paper.adaface(S, 0.4, q), batch)


def test_elasticface_draws_one_margin_per_sample() -> None:
    cosines = torch.linspace(-0.5, 0.9, 2000, dtype=torch.float64)
    drawn = ElasticFace(DIM, CLASSES, sigma=0.05, kind="cos", margin=0.35)
    torch.manual_seed(0)
    margins = cosines - drawn.target_cosines(cosines.arccos(), cosines)
    assert float(margins.mean()) == pytest.approx(0.35, abs=0.005)
    assert float(margins.std()) == pytest.approx(0.05, abs=0.005)
    sorted_ones = ElasticFace(DIM, CLASSES, sigma=0.05, kind="cos", margin=0.35, plus=True)
    torch.manual_seed(0)
    margins_plus = cosines - sorted_ones.target_cosines(cosines.arccos(), cosines)
    # The same random margins, with the larger one for the farther sample.
    assert torch.allclose(margins_plus.sort().values, margins.sort().values)
    assert bool((margins_plus.diff() <= 0).all())


EDGES = [(torch.float64, theta) for theta in (1e-5, 1e-3, math.pi - 0.5 - 1e-6, math.pi - 0.5 + 1e-6, math.pi - 1e-3)]
EDGES += [(torch.float32, theta) for theta in (1e-4, 3e-4, 1e-3)]


@pytest.mark.parametrize("name", HEAD_CASES)
@pytest.mark.parametrize(("dtype", "theta"), EDGES)
def test_a_head_matches_its_paper_at_the_edges(name: str, dtype: torch.dtype, theta: float) -> None:
    """Near the center, on both sides of ArcFace's boundary, and opposite the center: value, and slope by the angle."""
    make, expected = HEAD_CASES[name]
    built, y, exact = make().to(dtype), np.array([0]), dtype == torch.float64
    # The target lies along the first axis, the other classes across; no sub-center is nearer than the first.
    weight = weights_of(built)
    count = CLASSES if weight is None else len(weight)
    w = np.tile(np.eye(DIM)[2], (count, 1))
    w[0] = np.eye(DIM)[0]
    if count > CLASSES:
        w[1:3] = -np.eye(DIM)[1]
    with_weights(built, w)

    def at(angle: float) -> NDArray[np.float64]:
        return 2.0 * np.array([[math.cos(angle), math.sin(angle), 0, 0, 0]])

    inputs = torch.tensor(at(theta), dtype=dtype, requires_grad=True)
    loss = built(inputs, torch.from_numpy(y))
    loss.backward()
    assert loss.item() == pytest.approx(expected(at(theta), w, y), rel=1e-7 if exact else 1e-4, abs=1e-6)
    assert inputs.grad is not None
    along = torch.tensor([-math.sin(theta), math.cos(theta), 0, 0, 0], dtype=dtype)
    step = 1e-7
    slope = (expected(at(theta + step), w, y) - expected(at(theta - step), w, y)) / (2 * step)
    assert 2 * float(inputs.grad[0] @ along) == pytest.approx(slope, rel=1e-4 if exact else 0.02, abs=1e-4)


def near(theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return an embedding of length 2 at an angle from a weight of length 3, the weight, and the directions in which
    they move apart: the slope of the angle along these is 1/2 and 1/3."""
    axes = torch.linalg.qr(torch.randn(DIM, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))[0]
    x = math.cos(theta) * axes[0] + math.sin(theta) * axes[1]
    away = math.cos(theta) * axes[1] - math.sin(theta) * axes[0]
    return (2 * x).to(dtype), (3 * axes[0]).to(dtype), away.to(dtype), -axes[1].to(dtype)


PRECISIONS = [(torch.float64, theta) for theta in (1e-6, 1e-5, 1e-4, 1e-3)]
PRECISIONS += [(torch.float32, theta) for theta in (1e-4, 3e-4, 1e-3)]


@pytest.mark.parametrize("name", ["intra", "inter", "triplet", "triplet all"])
@pytest.mark.parametrize(("dtype", "theta"), PRECISIONS)
def test_angles_near_zero_have_their_value_and_slope(name: str, dtype: torch.dtype, theta: float) -> None:
    x, w, x_away, w_away = near(theta, dtype)
    x.requires_grad_()
    w.requires_grad_()
    rel = 1e-3 if dtype == torch.float64 else 0.02
    if name == "intra":
        loss = term(name)(x[None], torch.tensor([0]), w[None])
        value, slope_x, slope_w = theta / math.pi, 1 / (2 * math.pi), 1 / (3 * math.pi)
    elif name == "inter":
        loss = term(name)(x[None], torch.tensor([0]), torch.stack([x, w]))
        value, slope_x, slope_w = -theta / math.pi, -1 / (2 * math.pi), -1 / (3 * math.pi)
    else:  # an anchor with a positive and a negative across, 90 degrees from both
        across = torch.linalg.svd(torch.stack([x, w]).detach().double())[2][2].to(dtype)
        kind = {"mining": "all"} if name == "triplet all" else {}
        loss = term("triplet", margin=2.0, **kind)(torch.stack([x, w, across]), torch.tensor([0, 0, 1]), None)
        value, slope_x, slope_w = theta + 2 - math.pi / 2, 1 / 2, 1 / 3
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=rel)
    assert x.grad is not None
    assert w.grad is not None
    assert float(x.grad @ x_away) == pytest.approx(slope_x, rel=rel)
    assert float(w.grad @ w_away) == pytest.approx(slope_w, rel=rel)


@pytest.mark.parametrize("name", [*HEADS, *TERMS])
def test_gradients_are_finite_where_arccos_has_none(name: str) -> None:
    """Of equal and of opposite vectors, and on both sides of ArcFace's boundary."""
    for angle in (0.0, 1e-4, math.pi - 0.5 - 1e-6, math.pi - 0.5 + 1e-6, math.pi - 1e-4, math.pi):
        x = torch.tensor([[1.0, 0, 0, 0, 0]] * 3 + [[math.cos(angle), math.sin(angle), 0, 0, 0]], requires_grad=True)
        weight: Tensor | None
        if name in HEADS:
            built = head(name)
            w = np.tile(np.eye(DIM)[2], (3 * CLASSES, 1))
            w[:6] = np.eye(DIM)[0]
            weight = weights_of(with_weights(built, w))
            loss = built(x, torch.tensor([0, 0, 1, 1]))
        else:
            weight = torch.eye(CLASSES, DIM).index_fill(0, torch.tensor([5, 6]), 1.0).requires_grad_()
            loss = term(name)(x, torch.tensor([0, 0, 1, 1]), weight)
        loss.backward()
        assert torch.isfinite(loss)
        for tensor in (x, weight):
            assert tensor is None or tensor.grad is None or bool(torch.isfinite(tensor.grad).all())


@pytest.mark.parametrize("name", CASES)
def test_bf16_costs_only_the_rounding_of_embeddings(name: str, batch: Any) -> None:
    """In autocast, from embeddings in bf16: the value is the paper's for the rounded embeddings within 2e-5, and the
    gradient, which is in bf16 again, within 1 % of its largest part."""
    x, w, y = batch
    make, expected = CASES[name]
    built = make()
    rounded = torch.from_numpy(x).bfloat16().requires_grad_()
    weights = torch.from_numpy(w[:CLASSES]).float().requires_grad_()
    if isinstance(built, Head):
        held = weights_of(with_weights(built, w))
        weights = weights if held is None else held
    with torch.autocast("cpu", torch.bfloat16):
        loss = built(rounded, torch.from_numpy(y), *([] if isinstance(built, Head) else [weights]))
    at, known = rounded.detach().double().numpy(), weights.detach().double().numpy()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected(at, known, y), rel=2e-5)
    loss.backward()
    slope = paper.slope(lambda v: expected(v, known, y), at)
    gradient = np.zeros_like(at) if rounded.grad is None else rounded.grad.double().numpy()
    np.testing.assert_allclose(gradient, slope, atol=0.01 * float(np.abs(slope).max()))


@pytest.mark.parametrize("name", [*HEADS, *TERMS])
def test_state_is_saved_and_restored(name: str, batch: Any) -> None:
    x, w, y = batch
    weights = [] if name in HEADS else [torch.from_numpy(w[:CLASSES]).float()]
    trained, restored = (head(name) if name in HEADS else term(name) for _ in range(2))

    def value(module: nn.Module) -> float:
        torch.manual_seed(3)
        loss: Tensor = module(torch.from_numpy(x).float(), torch.from_numpy(y), *weights)
        return loss.item()

    for _ in range(3):
        value(trained)
    restored.load_state_dict(trained.state_dict())
    # Training mode: the next step, which reads and updates the state, must be equal.
    assert value(restored) == value(trained)
    for key, tensor in trained.state_dict().items():
        assert torch.equal(tensor, restored.state_dict()[key]), key


# CurricularFace's harder negatives stay.
@pytest.mark.parametrize("name", [n for n in HEADS if isinstance(head(n), CosineHead) and n != "curricularface"])
def test_a_margin_grows_from_zero(name: str, batch: Any) -> None:
    x, _, y = batch
    built = head(name).double().eval()
    assert isinstance(built, CosineHead)
    built.margin_share = 0.0
    logits = built.logits(torch.from_numpy(x), torch.from_numpy(y))
    assert torch.allclose(logits, built.scale * built.cosines(torch.from_numpy(x)), atol=2e-3)


def test_center_loss_moves_centers_by_its_algorithm(batch: Any) -> None:
    x, _, y = batch
    centers = np.zeros((CLASSES, DIM))
    built = term("center", alpha=0.5).double()
    for _ in range(3):
        expected = np.mean([0.5 * ((v - centers[k]) ** 2).sum() for v, k in zip(x, y, strict=True)])
        assert built(torch.from_numpy(x), torch.from_numpy(y), None).item() == pytest.approx(expected)
        moved = centers.copy()
        for j in range(CLASSES):
            members = x[y == j]
            moved[j] -= 0.5 * sum((centers[j] - v for v in members), np.zeros(DIM)) / (1 + len(members))
        centers = moved
        np.testing.assert_allclose(built.get_buffer("centers"), centers)
    built.eval()
    built(torch.from_numpy(x), torch.from_numpy(y), None)
    np.testing.assert_allclose(built.get_buffer("centers"), centers)


@pytest.mark.parametrize("built", [LSoftmax(DIM, CLASSES), ASoftmax(DIM, CLASSES)])
def test_the_share_of_the_margin_eases_multiplicative_margins(built: LSoftmax) -> None:
    """A third of the margin at lambda 5 is lambda 17."""
    x, w = np.random.default_rng(1).normal(size=(2, CLASSES, DIM))
    y = np.arange(CLASSES)
    built.double().weight.data = torch.from_numpy(w)
    for share, eased in ((0.0, 1e12), (1 / 3, 17), (1.0, 5)):
        built.margin_share = share
        found = built(torch.from_numpy(x), torch.from_numpy(y)).item()
        assert found == pytest.approx(paper.multiplicative(4, eased, built.unit_weights)(x, w, y), rel=1e-9)


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


def test_the_scale_of_adacos_is_bounded_and_moves_in_training_only(rng: np.random.Generator) -> None:
    built = AdaCos(DIM, CLASSES)
    x, y = torch.from_numpy(rng.normal(size=(BATCH, DIM))).float(), torch.zeros(BATCH, dtype=torch.long)
    built(x, y)
    moved = float(built.scale)
    assert moved != pytest.approx(fixed_scale(CLASSES))
    assert not built.scale.requires_grad
    built.eval()
    built(x * -1, y)
    assert float(built.scale) == moved
    built.train().scale.fill_(1000.0)  # exp overflows
    assert torch.isfinite(built(built.weight.detach()[:2] * 100, torch.tensor([1, 0])))
    assert torch.isfinite(built.scale)
    three = AdaCos(DIM, 3)
    three.weight.data.copy_(torch.tensor([[1.0, 0, 0, 0, 0], [-1, 0.1, 0, 0, 0], [-1, -0.1, 0, 0, 0]]))
    for _ in range(5):
        assert torch.isfinite(three(three.weight.detach()[:1], torch.tensor([0])))
    assert float(three.scale) == 1.0


@pytest.mark.parametrize(
    ("make", "name", "options", "message"),
    [
        (head, "cosface", {"scale": -1.0}, "scale"),
        (head, "cosface", {"margin": -0.1}, r"\[0, 2\)"),
        (head, "cosface", {"margin": "wide"}, "must be a float"),
        (head, "cosface", {"marjin": 0.3}, "has no option marjin; it has scale, margin"),
        (head, "arcface", {"margin": 4.0}, r"\[0, pi\)"),
        (head, "arcface", {"beyond": "sideways"}, "linear"),
        (head, "sphereface", {"beyond": "future"}, "continuous"),
        (head, "combined", {"m1": -1.0}, "m1 > 0"),
        (head, "l_softmax", {"margin": 0}, "must be an integer"),
        (head, "l2_softmax", {"alpha": -2.0}, "alpha"),
        (head, "magface", {"l_a": 200.0}, "l_a < u_a"),
        (head, "adaface", {"h": 0.0}, "h > 0"),
        (head, "elasticface", {"kind": "tan"}, "arc"),
        (head, "subcenter_arcface", {"centers": 0}, "one center"),
        (head, "curricularface", {"momentum": 1.5}, "momentum"),
        (head, "adacos", {"scale_floor": -1.0}, "scale_floor"),
        (head, "softmaxx", {}, "not one of softmax"),
        (term, "triplet", {"margin": 5.0}, "angular margin"),
        (term, "triplet", {"mining": "none"}, "semi_hard"),
        (term, "center", {"alpha": 0.0}, "alpha"),
        (term, "range", {"k": 0}, "k >= 1"),
        (term, "contrastive", {"margin": 0.0}, "positive"),
        (term, "ring", {"radius": -1.0}, "positive"),
        (term, "mhe", {"power": -1.0}, "power"),
        (term, "tripplet", {}, "not one of"),
    ],
)
def test_invalid_options_are_rejected(
    make: Callable[..., nn.Module], name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


def test_class_terms_need_a_head_with_class_weights() -> None:
    with pytest.raises(ConfigError, match="class weights"):
        build_term(TermConfig("inter"), head("none"), DIM, CLASSES)
    with pytest.raises(ConfigError, match="at least 3 classes"):
        build_head(HeadConfig("adacos"), DIM, 2)
    for name in ("normface", "softmax", "subcenter_arcface", "l_softmax"):
        with pytest.raises(ConfigError, match="at least 2 classes"):
            build_head(HeadConfig(name), DIM, 1)

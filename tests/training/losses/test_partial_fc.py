"""Heads and terms on two ranks have the loss and gradient of one process, and of their papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.losses import derivations as paper
from tests.training.losses import test_losses as oracle
from tests.training.runs import TINY, finish, start, tiny_run
from training import distributed
from training.backbones import build_backbone
from training.config import HeadConfig
from training.errors import NonFiniteLossError
from training.losses import HEADS, build_head
from training.losses.core import CosineHead, Head
from training.losses.partial_fc import PartialFC
from training.optimization.objective import build_objective
from training.optimization.run_folder import CHECKPOINT, load_checkpoint
from training.optimization.state import TrainingState

DIM, CLASSES, BATCH, WORLD = 8, 7, 12, 2
CASES: Final[dict[str, HeadConfig]] = {
    "elasticface_plus": HeadConfig("elasticface", {"plus": True, "sigma": 0.3, "scale": 8.0}),
    "elasticface_plus_cos": HeadConfig("elasticface", {"plus": True, "sigma": 0.3, "kind": "cos", "scale": 8.0}),
    "adaface": HeadConfig("adaface", {"scale": 8.0}),
    "adacos": HeadConfig("adacos"),
    "curricularface": HeadConfig("curricularface"),
}
"""Heads with a state, or with what other samples decide. The paper's cases cover the others."""


def build(name: str) -> Head:
    torch.manual_seed(3)
    head = build_head(CASES[name], DIM, CLASSES)
    if isinstance(head, CosineHead) and head.shardable:
        head.interclass_filter = 0.3
    return head.double().train()


def paper_batch() -> tuple[Any, Any, Any]:
    """Return ten embeddings, weights of all sub-centers, and labels, for the cases of `test_losses`."""
    rng = np.random.default_rng(7)
    return rng.normal(size=(10, oracle.DIM)), rng.normal(size=(3 * oracle.CLASSES, oracle.DIM)), np.arange(10) % 6


def paper_outcome(name: str, part: slice) -> dict[str, Tensor]:
    """Return loss and gradient of a case of `test_losses` for a part of the batch."""
    x, w, y = paper_batch()
    built, inputs, labels = oracle.CASES[name][0]().double(), torch.from_numpy(x[part]), torch.from_numpy(y[part])
    if isinstance(built, Head):
        return outcome(split(oracle.with_weights(built, w)), inputs, labels, 5)
    inputs.requires_grad_()
    loss = built(inputs, labels, torch.tensor(w[: oracle.CLASSES], requires_grad=True))
    loss.backward()
    return {"loss": loss.detach(), "gradient": torch.zeros_like(inputs) if inputs.grad is None else inputs.grad}


def split(head: Head) -> Head:
    return PartialFC(head, 1.0) if isinstance(head, CosineHead) and head.shardable else head


def batch() -> tuple[Tensor, Tensor]:
    """Return embeddings and labels whose classes are on both ranks, in no order."""
    generator = torch.Generator().manual_seed(11)
    x_BD = 2 * torch.randn(BATCH, DIM, generator=generator, dtype=torch.double)
    return x_BD, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def outcome(head: Head, x_BD: Tensor, labels_B: Tensor, seed: int) -> dict[str, Tensor]:
    """Return loss and gradient of a step whose margins are drawn with this seed."""
    x_BD = x_BD.detach().clone().requires_grad_()
    head.begin_step(labels_B)
    torch.manual_seed(seed)
    loss = head(x_BD, labels_B)
    loss.backward()
    assert x_BD.grad is not None
    return {"loss": loss.detach(), "gradient": x_BD.grad}


def on_each_rank(folder: Path) -> None:
    """Write what a rank finds."""
    rank = distributed.rank()
    part = slice(rank * BATCH // WORLD, (rank + 1) * BATCH // WORLD)
    x_BD, labels_B = batch()
    results: dict[str, Any] = {}
    for name in CASES:
        results[name] = outcome(split(build(name)), x_BD[part], labels_B[part], seed=5 + rank)
    for name in oracle.CASES:
        results[f"paper {name}"] = paper_outcome(name, slice(5 * rank, 5 * rank + 5))
    results["refusal"] = break_the_second_rank(rank, folder / "run")
    torch.save(results, folder / f"{rank}.pt")


def break_the_second_rank(rank: int, folder: Path) -> str:
    """Save a checkpoint, then another one after a class of the second rank is infinite. Return what is raised."""
    folder.mkdir(exist_ok=True)
    config = tiny_run(folder, folder, "cosface", class_sampling=1.0, sharded_checkpoint=True)
    objective = build_objective(config, CLASSES)
    state = TrainingState(build_backbone(TINY), objective, config.loop, torch.device("cpu"))
    state.loss = 1.0
    state.save(folder / CHECKPOINT)
    state.step += 1
    if rank == 1:
        assert isinstance(objective.head, PartialFC)
        objective.head.table_PD[0, 0] = float("inf")
    try:
        state.save(folder / CHECKPOINT)
    except NonFiniteLossError as error:
        return str(error)
    finally:
        state.close()
    return "saved"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    finish(start(WORLD, on_each_rank, folder))
    return [{**torch.load(folder / f"{rank}.pt", weights_only=True), "folder": folder} for rank in range(WORLD)]


@pytest.mark.parametrize("name", oracle.CASES)
def test_two_ranks_match_the_paper(name: str, ranks: list[dict[str, Any]]) -> None:
    x, w, y = paper_batch()
    expected = oracle.CASES[name][1]
    weight = oracle.weights_of(oracle.HEAD_CASES[name][0]()) if name in oracle.HEAD_CASES else None
    w = w[: oracle.CLASSES if weight is None else len(weight)]
    found = [result[f"paper {name}"] for result in ranks]
    assert torch.stack([one["loss"] for one in found]).mean().item() == pytest.approx(expected(x, w, y), rel=1e-9)
    gradient = torch.cat([one["gradient"] for one in found]) / WORLD
    np.testing.assert_allclose(gradient, paper.slope(lambda v: expected(v, w, y), x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    expected = outcome(build(name), *batch(), seed=5)
    losses = torch.stack([result[name]["loss"] for result in ranks])
    torch.testing.assert_close(losses.mean(), expected["loss"])
    # Gradients of a rank are multiplied by the number of ranks, since they are averaged afterwards.
    gradient = torch.cat([result[name]["gradient"] for result in ranks]) / WORLD
    torch.testing.assert_close(gradient, expected["gradient"], rtol=1e-6, atol=1e-9)


def test_a_rank_with_infinite_weights_stops_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """Each rank holds its classes only: the first one, which writes, sees finite values."""
    for result, named in zip(ranks, ("values of another rank", "shards.weight"), strict=True):
        assert f"step 1 is not saved, because values are not finite: {named}. " in result["refusal"]
    run = ranks[0]["folder"] / "run"
    assert load_checkpoint(run / CHECKPOINT)["step"] == 0
    assert [folder.name for folder in run.glob("classifier-*")] == ["classifier-0"]


def test_every_head_is_compared() -> None:
    compared = {config.name for config in CASES.values()} | {name.split()[0] for name in oracle.HEAD_CASES}
    assert compared | {"none", "agents"} == set(HEADS)

"""A plan counts memory as a run uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from training.backbones import ThinIResNet
from training.cli.commands import app
from training.config import ConfigError
from training.recipes import glint360k, webface42m
from training.run.plan import activation_bytes, make_plan


def test_activations_are_those_that_autograd_saves() -> None:
    network = ThinIResNet(16, (16, 16, 16), (1, 1, 1), 16)
    own = {p.data_ptr() for p in network.parameters()}
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    network.to(torch.bfloat16).train()
    own = {p.data_ptr() for p in network.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        kept = network(torch.randn(4, 3, 112, 112, dtype=torch.bfloat16))
    assert kept.shape == (4, 16)
    expected = sum(seen.values())
    assert activation_bytes(ThinIResNet(16, (16, 16, 16), (1, 1, 1), 16), 4) == pytest.approx(expected, rel=0.05)


def test_a_plan_splits_classes_and_batch_over_gpus() -> None:
    config = webface42m(Path(), Path("runs/plan"))
    plans = {gpus: make_plan(config, 42_474_557, 2_059_906, gpus, 500.0, 8000) for gpus in (8, 16)}
    one, two = plans[8].memory_bytes, plans[16].memory_bytes
    assert one["classifier"] == pytest.approx(2 * two["classifier"], rel=1e-3)
    assert one["activations"] == pytest.approx(2 * two["activations"], rel=0.01)
    # 2,059,906 classes / 8, weights and momentum, and three times the fifth in use: 512 float32 each.
    assert one["classifier"] == pytest.approx(2_059_906 / 8 * 512 * 4 * 2.6, rel=0.01)
    # All 360,232 / 8: weights, momentum, gradients and unit vectors.
    whole = make_plan(glint360k(Path(), Path("runs/plan")), 17_091_657, 360_232, 8, 500.0, 8000)
    assert whole.memory_bytes["classifier"] == pytest.approx(360_232 / 8 * 512 * 4 * 4, rel=0.01)
    assert plans[8].epoch_s == pytest.approx(42_474_557 / 4000)
    assert plans[8].read_bytes_per_s == 4000 * 8000
    with pytest.raises(ConfigError, match="does not divide by 7 GPUs"):
        make_plan(glint360k(Path(), Path("runs/plan")), 100, 10, 7, 500.0, 8000)


def test_the_command_measures_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "backbone.name=thin_iresnet", "--set", "backbone.embedding_dim=16"]
    app(["plan", "ms1mv3", "--gpus", "8", *small], standalone_mode=False)
    assert "Time per epoch" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="with --images and --classes"):
        app(["plan", "compact"], standalone_mode=False)

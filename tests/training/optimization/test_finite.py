"""A checkpoint with a NaN or infinite value never replaces a finite one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.training.runs import SIDE, STEPS_PER_EPOCH, TINY, tiny_run, write_people
from training.backbones import build_backbone
from training.config import HeadConfig, RunConfig
from training.data.identities import load_identities
from training.errors import NonFiniteLossError, RunInterruptedError
from training.optimization import loop as loop_module
from training.optimization.health import RunHealth
from training.optimization.logs import RunLog
from training.optimization.loop import Validator, fit
from training.optimization.monitor import Monitor, StepResult
from training.optimization.objective import build_objective
from training.optimization.run_folder import CHECKPOINT, load_checkpoint, require_finite

LAST = 2 * STEPS_PER_EPOCH


@contextmanager
def overflowing_steps() -> Iterator[None]:
    """Make a weight infinite in every optimizer step, from a finite loss and gradient."""

    def overflow(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.param_groups[0]["params"][0].data[0].fill_(float("inf"))

    handle = register_optimizer_step_post_hook(overflow)
    try:
        yield
    finally:
        handle.remove()


def run(config: RunConfig, validate: Validator | None = None) -> None:
    data = load_identities(config.data, config.output.parent / "cache")
    fit(build_backbone(TINY, SIDE), build_objective(config, data.num_classes), data, config, validate)


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("last", {"precision": "bf16"}),
        ("periodic", {"precision": "fp16"}),
        ("interrupted", {"ema_decay": 0.0, "optimizer": "adamw"}),
        ("periodic", {"class_sampling": 0.5, "sharded_checkpoint": True}),
    ],
)
def test_infinite_weights_keep_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, changes: dict[str, object]
) -> None:
    output = tmp_path / "run"
    config = tiny_run(write_people(tmp_path / "people"), output, "cosface", epochs=3, **changes)
    with monkeypatch.context() as patch:
        patch.setattr("training.optimization.loop._agree_to_stop", lambda step, requested: step == LAST - 1)
        with pytest.raises(RunInterruptedError):
            run(config)
    names = {file.name for file in output.iterdir()}
    monkeypatch.setattr(loop_module, "_time_to_save", lambda step, due: path == "periodic")
    monkeypatch.setattr(loop_module, "_agree_to_stop", lambda step, requested: path == "interrupted")
    epochs = LAST // STEPS_PER_EPOCH if path == "last" else config.loop.epochs
    message = r"checkpoint of step (\d) is not saved.*backbone\..*last checkpoint is kept"
    with overflowing_steps(), pytest.raises(NonFiniteLossError, match=message) as refused:
        run(replace(config, loop=replace(config.loop, epochs=epochs)))
    kept, step = load_checkpoint(output / CHECKPOINT), re.search(message, str(refused.value))
    assert step is not None
    assert kept["step"] == int(step[1]) - 1
    require_finite(kept, kept["step"])
    assert {file.name for file in output.iterdir()} == names


def test_a_validation_figure_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    config = tiny_run(write_people(tmp_path / "people"), tmp_path / "run", "cosface", epochs=1)
    with pytest.raises(NonFiniteLossError, match=f"step {STEPS_PER_EPOCH} is not saved.*: held-out loss"):
        run(config, lambda network, ended: {"accuracy": 1.0, "held-out loss": float("nan")})
    assert not (tmp_path / "run" / CHECKPOINT).exists()


@pytest.mark.parametrize("name", ["gradient_backbone", "embedding_norm", "target_angle_deg", "loss"])
def test_values_read_late_are_checked(tmp_path: Path, name: str) -> None:
    """On a GPU without a loss scaler, a gradient is first seen here."""
    config = HeadConfig("cosface")
    values = {"loss": 1.0, "gradient_backbone": 1.0, "embedding_norm": 1.0, "target_angle_deg": 60.0, name: np.nan}
    result = StepResult(7, {key: torch.tensor(value) for key, value in values.items()}, {"learning_rate": 0.1})
    for scaled in (False, True):
        monitor = Monitor(RunHealth(100, config, 6), torch.device("cpu"), scaled)
        monitor.add(result)
        with closing(RunLog(tmp_path, 0, 10, 8, silent=True, epoch_steps=10)) as logs:
            if scaled and name == "gradient_backbone":  # the scaler skipped this step
                monitor.flush(logs)
                assert monitor.loss == 1.0
            else:
                with pytest.raises(NonFiniteLossError, match=f"{name} is not finite at step 7"):
                    monitor.flush(logs)

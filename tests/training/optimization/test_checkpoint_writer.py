"""Checkpoints are written while training goes on, as they were when the step ended."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.runs import PEOPLE, STEPS_PER_EPOCH, TINY, tiny_run, write_people
from training.backbones import build_backbone
from training.optimization import loop as loop_module
from training.optimization import run_folder
from training.optimization import state as state_module
from training.optimization.checkpoint_writer import CheckpointWriter
from training.optimization.objective import build_objective
from training.optimization.run_folder import load_checkpoint
from training.optimization.state import TrainingState
from training.run.train import train_recognizer

DEADLINE_S = 60


def test_steps_do_not_wait_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first checkpoint is written only when two further steps have begun."""
    monkeypatch.setattr(loop_module, "_time_to_save", lambda step, due: step == 1)
    began, step, save = threading.Event(), loop_module.train_step, run_folder.save_atomically

    def watched(network: Any, state: TrainingState, *arguments: Any) -> Any:
        if state.step == 2:
            began.set()
        return step(network, state, *arguments)

    def slow(path: Path, document: dict[str, Any]) -> None:
        assert began.wait(DEADLINE_S), "training waits for the checkpoint"
        save(path, document)

    monkeypatch.setattr(loop_module, "train_step", watched)
    monkeypatch.setattr(state_module, "save_atomically", slow)
    config = tiny_run(write_people(tmp_path / "people"), tmp_path / "run", epochs=1)
    assert load_checkpoint(train_recognizer(config).path)["step"] == STEPS_PER_EPOCH


@pytest.mark.parametrize("sampling", [0.0, 1.0])
def test_later_steps_do_not_change_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: float
) -> None:
    config = tiny_run(tmp_path, tmp_path / "run", "cosface", class_sampling=sampling)
    state = TrainingState(build_backbone(TINY), build_objective(config, PEOPLE), config.loop, torch.device("cpu"))
    state.loss = 1.0
    changed, save = threading.Event(), run_folder.save_atomically

    def slow(path: Path, document: dict[str, Any]) -> None:
        assert changed.wait(DEADLINE_S)
        save(path, document)

    monkeypatch.setattr(state_module, "save_atomically", slow)
    tensors = [*state.backbone.state_dict().values(), *state.averaged.state_dict().values(), *state.objective.buffers()]
    tensors += [parameter.data for parameter in state.objective.parameters()]
    before = {name: value.clone() for name, value in state.backbone.state_dict().items()}
    head = state.objective.head.full_state()["weight"].clone()
    state.save(tmp_path / "checkpoint.pt")
    for tensor in tensors:
        tensor.zero_()
    changed.set()
    state.close()
    saved = load_checkpoint(tmp_path / "checkpoint.pt")
    assert all(torch.equal(saved["backbone"][name], value) for name, value in before.items())
    assert torch.equal(saved["head"]["weight"], head)


def full(*_arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_failure_is_raised_at_the_next_checkpoint_which_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(tmp_path, tmp_path / "run", "cosface")
    state = TrainingState(build_backbone(TINY), build_objective(config, PEOPLE), config.loop, torch.device("cpu"))
    state.loss = 1.0
    with monkeypatch.context() as patch:
        patch.setattr(state_module, "save_atomically", full)
        state.save(tmp_path / "checkpoint.pt")
        assert isinstance(state._writer.wait(), OSError)
    state.step = 5
    with pytest.raises(OSError, match="No space"):
        state.save(tmp_path / "checkpoint.pt")
    state.close()
    assert load_checkpoint(tmp_path / "checkpoint.pt")["step"] == 5
    # That of the last one, at the end.
    writer = CheckpointWriter(torch.device("cpu"))
    writer.begin(full)
    with pytest.raises(OSError, match="No space"):
        writer.close()

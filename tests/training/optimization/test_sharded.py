"""Eight ranks with sharded checkpoints, killed, resume at four with the losses of an uninterrupted run."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.runs import DEADLINE_S, PLAIN, finish, losses, start, tiny_run, train_plain, write_people
from training.config import ConfigError, HeadConfig, RunConfig
from training.optimization.run_folder import load_checkpoint
from training.optimization.sharded import read_class_weights
from training.run.train import train_recognizer

PEOPLE, BATCH, STEPS = 11, 16, 12


@pytest.mark.long
def test_eight_ranks_killed_resume_at_four(tmp_path: Path) -> None:
    people = write_people(tmp_path / "people", images=2, people=PEOPLE)

    def config(name: str) -> RunConfig:
        made = tiny_run(people, tmp_path / name, "cosface", epochs=STEPS, learning_rate=0.005, checkpoint_seconds=0.0)
        loop = replace(made.loop, batch_size=BATCH, class_sampling=1.0, sharded_checkpoint=True)
        return replace(made, head=HeadConfig("cosface", {"scale": 4.0}), augment=PLAIN, loop=loop)

    finish(start(8, train_plain, config("whole")))
    ranks = start(8, train_plain, config("run"))
    log, deadline = tmp_path / "run" / "losses.csv", time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and not (log.exists() and len(log.read_text().splitlines()) > 5):
        ranks[0].join(0.02)
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    assert 3 < len(losses(tmp_path / "run")) < STEPS
    finish(start(4, train_plain, config("run")))
    one, other = ([float(v) for _, v in losses(tmp_path / name)] for name in ("whole", "run"))
    assert len(one) == STEPS
    assert other == pytest.approx(one, rel=1e-2)
    weights = []
    for name in ("whole", "run"):
        state = load_checkpoint(tmp_path / name / "checkpoint.pt")
        assert "weight" not in state["head"]
        assert set(state["shards"]["tables"]) == {"weight", "momentum_buffer"}
        (folder,) = (tmp_path / name).glob("classifier-*")
        assert folder.name == f"classifier-{STEPS}"
        weight = read_class_weights(tmp_path / name, state)
        assert weight is not None
        weights.append(weight)
    assert weights[0].shape == (PEOPLE, 16)
    assert torch.allclose(weights[0], weights[1], atol=1e-2)
    with pytest.raises(ConfigError, match=r"loop\.class_sampling"):
        train_recognizer(replace(config("run"), loop=replace(config("run").loop, class_sampling=0.0)))

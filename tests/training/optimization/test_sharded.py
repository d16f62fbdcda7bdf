"""Eight ranks with sharded checkpoints, killed, resume at four with the losses of an uninterrupted run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tests.training.runs import PLAIN, SIDE, losses, tiny_run, train_plain
from training import distributed
from training.config import ConfigError, HeadConfig, RunConfig
from training.optimization.run_folder import load_checkpoint
from training.optimization.sharded import read_class_weights
from training.run.train import train_recognizer

PEOPLE, BATCH, STEPS = 11, 16, 12
DEADLINE_S = 240
Task = Callable[[RunConfig], object]
"""Function that each rank runs."""


def write_many(root: Path) -> Path:
    rng = np.random.default_rng(5)
    for person in range(PEOPLE):
        (root / f"p{person:02}").mkdir(parents=True)
        for i in range(2):
            image = np.clip(rng.integers(0, 255, 3) + rng.normal(0, 20, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
            cv2.imwrite(str(root / f"p{person:02}" / f"{i}.png"), image)
    return root


def rank_main(rank: int, world: int, port: int, config: RunConfig, task: Task) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with distributed.process_group():
        task(config)


def start(world: int, config: RunConfig, task: Task = train_recognizer) -> Sequence[BaseProcess]:
    """Start the ranks from a process without threads: forks of the test's own process may hang, or end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks: list[BaseProcess] = [
        context.Process(target=rank_main, args=(rank, world, port, config, task)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    return ranks


def finish(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in ranks] == [0] * len(ranks)


@pytest.mark.long
def test_eight_ranks_killed_resume_at_four(tmp_path: Path) -> None:
    people = write_many(tmp_path / "people")

    def config(name: str) -> RunConfig:
        made = tiny_run(people, tmp_path / name, "cosface", epochs=STEPS, learning_rate=0.005)
        loop = replace(made.loop, batch_size=BATCH, class_sampling=1.0, sharded_checkpoint=True)
        return replace(made, head=HeadConfig("cosface", {"scale": 4.0}), augment=PLAIN, loop=loop)

    finish(start(8, config("whole"), train_plain))
    ranks = start(8, config("run"), train_plain)
    log, deadline = tmp_path / "run" / "losses.csv", time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and not (log.exists() and len(log.read_text().splitlines()) > 5):
        ranks[0].join(0.02)
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    assert 3 < len(losses(tmp_path / "run")) < STEPS
    finish(start(4, config("run"), train_plain))
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

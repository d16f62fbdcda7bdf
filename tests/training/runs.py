"""Tiny training runs on six people with one color each: seconds, with every part of a real run; and their ranks."""

from __future__ import annotations

import csv
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from tests.forks import CONTEXT
from training import distributed
from training.cli.commands import app
from training.config import AugmentConfig, BackboneConfig, DataConfig, HeadConfig, LoopConfig, RunConfig
from training.data.identities import IdentityList, IdentitySet, PhotoFiles
from training.evaluation.embedding import Embed
from training.optimization.loop import Checkpoint
from training.run.train import train_recognizer

TINY = BackboneConfig(embedding_dim=16, widths=(16, 16, 16), depths=(1, 1, 1), stem=16)
PEOPLE, IMAGES, BATCH, SIDE = 6, 4, 8, 32
STEPS_PER_EPOCH = PEOPLE * IMAGES // BATCH
DEADLINE_S = 240
T = TypeVar("T")


def write_people(root: Path, images: int = IMAGES, side: int = SIDE, people: int = PEOPLE) -> Path:
    """Write one folder per person with noisy crops of this side."""
    rng = np.random.default_rng(5)
    for person in range(people):
        (root / f"p{person}").mkdir(parents=True)
        color = rng.integers(0, 255, 3)
        for i in range(images):
            image = np.clip(color + rng.normal(0, 20, (side, side, 3)), 0, 255).astype(np.uint8)
            cv2.imwrite(str(root / f"p{person}" / f"{i}.png"), image)
    return root


def tiny_run(folder: Path, output: Path, head: str = "adacos", epochs: int = 4, **loop: object) -> RunConfig:
    config = LoopConfig(epochs=epochs, batch_size=BATCH, warmup=0.1, checkpoint_seconds=600.0, precision="fp32")
    return RunConfig(
        "tiny",
        output,
        DataConfig(folder, manifest=None, crop_px=SIDE, held_out_people=0, held_out_photos=0),
        TINY,
        HeadConfig(head),
        loop=replace(config, **loop),  # type: ignore[arg-type]
    )


class PlainNetwork(nn.Sequential):
    """Network of 16 numbers for crops of `SIDE`, without batch norm, which on CPUs each rank has of its own images."""

    def __init__(self) -> None:
        first, second = nn.Conv2d(3, 16, 8, stride=8), nn.Conv2d(16, 16, 2, stride=2)
        super().__init__(first, nn.PReLU(16), second, nn.PReLU(16), nn.Flatten(), nn.Linear(64, 16))


def train_plain(config: RunConfig) -> Checkpoint:
    """Train a `PlainNetwork` instead of the backbone."""
    with patch("training.run.train.build_backbone", lambda *_: PlainNetwork()):
        return train_recognizer(config)


PLAIN = AugmentConfig(flip=0, move=0, low_resolution=0, gray=0, brightness=0, contrast=0, erase=0)


def call(*words: object) -> None:
    """Run a command of `kith-train`."""
    app([str(word) for word in words], standalone_mode=False)


def table(path: Path) -> list[dict[str, str]]:
    """Read a CSV."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def losses(output: Path) -> list[tuple[str, str]]:
    return [(row["step"], row["loss"]) for row in table(output / "losses.csv")]


def as_set(crops: NDArray[np.uint8]) -> IdentitySet:
    """Return crops as images of one person."""
    labels, ids = np.zeros(len(crops), np.int64), np.zeros(1, np.int64)
    listed = IdentityList(PhotoFiles(()), np.arange(len(crops)), labels, ("one",), dropped=0)
    return IdentitySet(crops, labels, ("one",), ids, listed)


def with_mirror(embed: Embed, crops: NDArray[np.uint8]) -> Float:
    """Return what a teacher with this embedder teaches."""
    return l2_normalize(embed(crops) + embed(np.ascontiguousarray(crops[:, :, ::-1])))


def _rank(rank: int, world: int, port: int, task: Callable[[T], object], argument: T) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with distributed.process_group():
        task(argument)


def start(world: int, task: Callable[[T], object], argument: T) -> Sequence[BaseProcess]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [CONTEXT.Process(target=_rank, args=(rank, world, port, task, argument)) for rank in range(world)]
    for process in ranks:
        process.start()
    return ranks


def finish(ranks: Sequence[BaseProcess]) -> None:
    """Wait for the ranks. None is left, and each has succeeded."""
    for process in ranks:
        process.join(DEADLINE_S)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * len(ranks), "a rank failed, or hangs (None)"

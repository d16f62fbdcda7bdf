"""Ranks of a run, as processes on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from tests.forks import CONTEXT
from training import distributed

DEADLINE_S = 240
T = TypeVar("T")


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

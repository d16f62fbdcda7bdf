"""Measure Kith's training loop beside a plain PyTorch loop with the same network, head, batches and precision.

After each epoch of Kith's loop on generated crops (recipe `compact`), the plain one takes as many steps. The first turn
warms up; in the last, parts of a step are timed. Writes bench/results/training_speed.md and .json; exits 1 below GOAL.

    python -m bench.training_speed [--steps 8]
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bench.common import RESULTS, in_words, ratios, spread, table, write
from bench.machine import about
from training import distributed
from training.backbones import build_backbone
from training.config import RunConfig
from training.data.augment import augment
from training.data.batches import Batches
from training.data.identities import IdentitySet
from training.optimization.loop import fit, to_tensor
from training.optimization.objective import build_objective
from training.recipes import compact

GOAL: Final = 0.95
PEOPLE: Final = 8000
SETTINGS: Final = {"loop.epochs": "10", "loop.checkpoint_seconds": "1e9"}
PARTS = WAITING, NETWORK, OPTIMIZER, REST = ("waiting for data", "forward and backward", "optimizer", "everything else")


class Clock:
    """Seconds of a turn. If ``detailed``, they are by part: each mark waits for the GPU and ends the part it names."""

    def __init__(self) -> None:
        self._seconds, self._last, self.detailed = defaultdict[str, float](float), time.perf_counter(), False

    def mark(self, part: str, end: bool = False) -> None:
        if self.detailed or end:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._seconds[part] += (now := time.perf_counter()) - self._last
            self._last = now

    def end_turn(self) -> dict[str, float]:
        self.mark(REST, end=True)
        ended, self._seconds = self._seconds, defaultdict(float)
        return ended

    def network(self, config: RunConfig) -> torch.nn.Module:
        network = build_backbone(config.backbone)
        network.register_forward_pre_hook(lambda *_: self.mark(REST))
        next(network.parameters()).register_post_accumulate_grad_hook(lambda _: self.mark(NETWORK))  # type: ignore[no-untyped-call]
        return network


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8, help="of a turn; 500 on a GPU")
    with TemporaryDirectory() as folder:
        config = compact(Path(folder), Path(folder) / "run").overridden(SETTINGS)
        figures = measure(config, generated(Path(folder), parser.parse_args().steps * config.loop.batch_size))
    write(RESULTS / "training_speed.md", text := markdown(figures), figures)
    print(text)
    raise SystemExit(figures["ratio"]["median"] < GOAL)


def generated(folder: Path, count: int) -> IdentitySet:
    crops = np.memmap(folder / "crops", np.uint8, "w+", shape=(count, 112, 112, 3))
    crops[:] = np.random.default_rng(0).integers(0, 256, crops.shape, np.uint8)
    return IdentitySet(crops, np.arange(count) % PEOPLE, tuple(map(str, range(PEOPLE))), np.arange(PEOPLE))


def plain(config: RunConfig, data: IdentitySet, clock: Clock) -> Iterator[None]:
    """Train as PyTorch's examples do, on the batches of the run; yield after each epoch."""
    device, loop = distributed.device(), config.loop
    network = clock.network(config).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    head = build_objective(config, data.num_classes).head.to(device)
    parameters = [*network.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, loop.learning_rate, loop.momentum, weight_decay=loop.weight_decay)
    batches = Batches(data, config, slice(None), device)
    for batch in batches.iterate(0):
        images = augment(to_tensor(batch.crops, device), batch.uniforms, config.augment)
        with torch.autocast(device.type, torch.bfloat16, enabled=distributed.has_native_bf16()):
            embeddings = network(images.contiguous(memory_format=torch.channels_last))
        optimizer.zero_grad()
        head(embeddings, batch.labels).backward()
        optimizer.step()
        if (batch.step + 1) % batches.steps_per_epoch == 0:
            yield


def measure(config: RunConfig, data: IdentitySet) -> dict[str, Any]:
    """Return images per second of each turn of both loops, their ratios, and the shares of time in the last turn."""
    load, clock, loops = os.getloadavg()[0], Clock(), {"Kith": list[Any](), "plain": list[Any]()}
    beside, iterate = plain(config, data, clock), Batches.iterate

    def waited_for(batches: Batches, first: int) -> Iterator[Any]:
        for batch in iterate(batches, first):
            clock.mark(WAITING)
            yield batch
            clock.mark(REST)

    def after_epoch(*_: object) -> Mapping[str, float]:
        loops["Kith"].append(clock.end_turn())
        next(beside)
        loops["plain"].append(clock.end_turn())
        clock.detailed = len(loops["Kith"]) == config.loop.epochs - 1
        return {}

    with (
        register_optimizer_step_pre_hook(lambda *_: clock.mark(REST)),
        register_optimizer_step_post_hook(lambda *_: clock.mark(OPTIMIZER)),
        patch.object(Batches, "iterate", waited_for),
    ):
        fit(clock.network(config), build_objective(config, data.num_classes), data, config, after_epoch)
    rates = {name: [len(data) / sum(turn.values()) for turn in turns[1:-1]] for name, turns in loops.items()}
    shares = {name: {part: last[part] / sum(last.values()) for part in PARTS} for name, (*_, last) in loops.items()}
    ratio = spread(ratios(*rates.values()))
    return {**about(), "load": load, "images_per_s": rates, "ratio": ratio, "shares": shares}


def markdown(figures: Mapping[str, Any]) -> str:
    rates, shares, ratio = (figures[name] for name in ("images_per_s", "shares", "ratio"))
    rows = [[name, in_words(spread(rates[name])), *(f"{shares[name][part]:.1%}" for part in PARTS)] for name in rates]
    return f"""# Speed of training

`make bench-training`, {figures["date"]}, commit {figures["commit"]}, {figures["machine"]}. In the minute before,
{figures["load"]:.1f} other processes wanted a core. Median, minimum and maximum of the turns, and shares of time in one
more. The plain loop lacks Kith's clipping of gradients, average of the weights, checks and logs.

{table(["", "images/s", *PARTS], rows)}

Ratio within a turn: {in_words(ratio)}, {"at least" if ratio["median"] >= GOAL else "**below**"} the goal of {GOAL}.
"""


if __name__ == "__main__":
    main()

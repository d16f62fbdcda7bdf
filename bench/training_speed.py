"""Compare training speed: each backbone as a plain fp32 loop and in the trainer; a large classifier whole and with
Partial FC.

Prints interleaved medians with their spread and ratios to the plain loop, and writes JSON.

    python -m bench.training_speed [--rounds 7] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from models.runtime.onnx_runtime import available_cores
from training import distributed
from training.backbones import build_backbone, checkpoint_blocks
from training.config import BackboneConfig, BackboneName
from training.losses import CosFace, Head, PartialFC

BACKBONES: tuple[tuple[BackboneName, int], ...] = (("thin_iresnet", 64), ("mobilefacenet", 32), ("iresnet18", 16))
GPU_BACKBONES: tuple[tuple[BackboneName, int], ...] = (
    ("thin_iresnet", 512),
    ("mobilefacenet", 256),
    ("iresnet50", 128),
)
CLASSES, GPU_CLASSES, SAMPLING, HEAD_BATCH, DIM = 100_000, 1_000_000, 0.1, 128, 256
RESULTS = Path(__file__).parent / "results"


def backbone_step(
    network: nn.Module, batch: int, bf16: bool, channels_last: bool, device: torch.device
) -> Callable[[], None]:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = network.train().to(device, memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, 112, 112, device=device).contiguous(memory_format=layout)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            out = network(images)
        optimizer.zero_grad(set_to_none=True)
        out.float().square().mean().backward()
        optimizer.step()

    return step


def head_step(head: Head, classes: int, device: torch.device) -> Callable[[], None]:
    head = head.train().to(device)
    x = torch.randn(HEAD_BATCH, DIM, device=device, requires_grad=True)
    labels = torch.randint(classes, (HEAD_BATCH,), device=device)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        head(x, labels).backward()
        with head.optimizer_step(optimizer):
            optimizer.step()

    return step


def by_turns(steps: dict[str, Callable[[], None]], images: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return images a second of each, and the ratio to the first; one step of each warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    first = statistics.median(seconds[next(iter(steps))])
    return {
        name: {
            "images_per_s": round(images / statistics.median(taken), 1),
            "least": round(images / max(taken), 1),
            "most": round(images / min(taken), 1),
            "ratio": round(first / statistics.median(taken), 2),
        }
        for name, taken in seconds.items()
    }


def backbone_steps(name: BackboneName, batch: int, device: torch.device) -> dict[str, Callable[[], None]]:
    def fresh() -> nn.Module:
        return build_backbone(BackboneConfig(name, embedding_dim=DIM))

    recomputing = fresh()
    checkpoint_blocks(recomputing)
    return {
        "plain fp32": backbone_step(fresh(), batch, False, False, device),
        "fp32, channels last": backbone_step(fresh(), batch, False, True, device),
        "bf16, channels last": backbone_step(fresh(), batch, True, True, device),
        "bf16, channels last, recomputed": backbone_step(recomputing, batch, True, True, device),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=available_cores())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = distributed.device()
    on_gpu = device.type == "cuda"
    if not on_gpu:
        print("No GPU here: these are the processor's figures.")
    results: dict[str, Any] = {}
    for name, batch in GPU_BACKBONES if on_gpu else BACKBONES:
        results[f"{name}, batch {batch}"] = by_turns(
            backbone_steps(name, batch, device), batch, arguments.rounds, device
        )
    classes = GPU_CLASSES if on_gpu else CLASSES
    heads = {
        "whole": head_step(CosFace(DIM, classes), classes, device),
        f"Partial FC, {SAMPLING:.0%} of the classes": head_step(
            PartialFC(CosFace(DIM, classes), SAMPLING), classes, device
        ),
    }
    results[f"classifier of {classes:,} classes, batch {HEAD_BATCH}"] = by_turns(
        heads, HEAD_BATCH, arguments.rounds, device
    )
    machine = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()}, {arguments.threads} cores"
    path = RESULTS / ("gpu-training_speed.json" if on_gpu else "training_speed.json")
    path.write_text(json.dumps({"machine": machine, "rounds": arguments.rounds, **results}, indent=2) + "\n")
    table = Table("What", "How", "images/s", "least to most", "ratio")
    for what, variants in results.items():
        for how, figures in variants.items():
            spread = f"{figures['least']} to {figures['most']}"
            table.add_row(what, how, str(figures["images_per_s"]), spread, f"{figures['ratio']}x")
    Console().print(table)


if __name__ == "__main__":
    main()

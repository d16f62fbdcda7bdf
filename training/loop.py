"""The optimisation loop: one process, reproducible, resumable to the bit on a CPU."""

from __future__ import annotations

import copy
import csv
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from training.config import LoopConfig, Precision
from training.data.augment import augment
from training.data.identities import IdentitySet
from training.losses import CosineHead

log = logging.getLogger(__name__)


class NonFiniteLossError(RuntimeError):
    """The loss became NaN or infinite; the message names step and cause."""


@dataclass
class Checkpoint:
    """What a finished (or interrupted) run knows. ``backbone`` holds the averaged weights when EMA is on."""

    backbone: nn.Module
    head: CosineHead
    step: int
    loss: float
    path: Path


def bf16_is_native() -> bool:
    """Whether this machine multiplies bfloat16 in hardware (CUDA, AMX or AVX512-BF16)."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    return "amx_bf16" in flags or "avx512_bf16" in flags


def autocast_enabled(precision: Precision) -> bool:
    return precision == "bf16" or (precision == "auto" and bf16_is_native())


def learning_rate(step: int, total_steps: int, config: LoopConfig) -> float:
    """Linear warm-up, then half a cosine to zero."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def fit(backbone: nn.Module, head: CosineHead, data: IdentitySet, config: LoopConfig, output: Path) -> Checkpoint:
    """Train ``backbone`` and ``head``; resume from ``output/checkpoint.pt`` where it exists.

    Losses go to ``output/losses.csv``. A run killed and resumed continues with the losses of one that was not:
    the batch order is a function of (seed, epoch), and augmentation draws from a saved generator.

    Raises:
        NonFiniteLossError: the loss is NaN or infinite; the last checkpoint stays as it was.
    """
    output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone = backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    head = head.to(device)
    averaged = copy.deepcopy(backbone).requires_grad_(False)
    parameters = [*backbone.parameters(), *head.parameters()]
    optimiser = torch.optim.SGD(
        _decay_groups(backbone, head, config.weight_decay), lr=config.learning_rate, momentum=config.momentum
    )
    generator = torch.Generator().manual_seed(config.seed)
    steps_per_epoch = len(data) // config.batch_size
    if steps_per_epoch == 0:
        raise ValueError(f"{len(data)} images are fewer than one batch of {config.batch_size}; lower loop.batch_size")
    total_steps = steps_per_epoch * config.epochs
    path = output / "checkpoint.pt"
    step, loss_value = 0, math.nan
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        backbone.load_state_dict(state["backbone"])
        averaged.load_state_dict(state["averaged"])
        head.load_state_dict(state["head"])
        optimiser.load_state_dict(state["optimiser"])
        generator.set_state(state["generator"].cpu())
        step, loss_value = int(state["step"]), float(state["loss"])
        log.info("resumed %s at step %d of %d", path, step, total_steps)

    def save() -> None:
        save_atomically(
            path,
            {
                "backbone": backbone.state_dict(),
                "averaged": averaged.state_dict(),
                "head": head.state_dict(),
                "optimiser": optimiser.state_dict(),
                "generator": generator.get_state(),
                "step": step,
                "loss": loss_value,
            },
        )

    margin = margin_schedule(head, config.margin_warmup_steps)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=autocast_enabled(config.precision))
    last_saved = time.monotonic()
    backbone.train()
    head.train()
    with (
        closing(LossLog(output / "losses.csv", step, ("loss", "learning_rate", "scale"))) as losses,
        tqdm(total=total_steps * config.batch_size, initial=step * config.batch_size, unit="img") as bar,
    ):
        while step < total_steps:
            epoch, position = divmod(step, steps_per_epoch)
            rows = batch_rows(len(data), config.batch_size, epoch, position, config.seed)
            images = augment(to_tensor(data.crops_NHWC[rows]), generator).to(device, memory_format=torch.channels_last)
            labels = torch.from_numpy(data.labels[rows]).to(device)
            rate = learning_rate(step, total_steps, config)
            for group in optimiser.param_groups:
                group["lr"] = rate
            margin(step)
            with autocast:
                embeddings = backbone(images)
            loss = head(embeddings, labels)
            loss_value = float(loss.detach())
            if not math.isfinite(loss_value):
                raise NonFiniteLossError(_diagnose(step, rows, embeddings, head))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, config.gradient_clip)
            optimiser.step()
            step += 1
            update_average(averaged, backbone, min(config.ema_decay, step / (step + 10)))
            losses.add(step, loss_value, rate, float(head.scale))
            bar.update(config.batch_size)
            bar.set_postfix(epoch=epoch + 1, loss=f"{loss_value:.3f}", s=f"{float(head.scale):.1f}")
            if time.monotonic() - last_saved > config.checkpoint_seconds:
                save()
                last_saved = time.monotonic()
    save()
    return Checkpoint(averaged.eval(), head.eval(), step, loss_value, path)


def batch_rows(count: int, batch_size: int, epoch: int, position: int, seed: int) -> NDArrayInt:
    """The rows of one batch: a shuffle that depends on (seed, epoch) alone, so that any step can be returned to."""
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return np.sort(order[position * batch_size : (position + 1) * batch_size])


NDArrayInt = np.ndarray[Any, np.dtype[np.int64]]


def to_tensor(crops_NHWC: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """(n, 112, 112, 3) uint8 to (n, 3, 112, 112) float32 in [-1, 1]."""
    return (torch.from_numpy(np.ascontiguousarray(crops_NHWC)).permute(0, 3, 1, 2).float() - 127.5) / 127.5


def margin_schedule(head: CosineHead, warmup_steps: int) -> Any:
    """Return a function of the step that grows the head's margin from 0 to its own value."""
    name = next((n for n in ("margin", "margin_rad") if hasattr(head, n)), None)
    if name is None or warmup_steps == 0:
        return lambda step: None
    full = float(getattr(head, name))
    return lambda step: setattr(head, name, full * min(1.0, step / warmup_steps))


@torch.no_grad()
def update_average(averaged: nn.Module, model: nn.Module, decay: float) -> None:
    """Exponential moving average of every floating tensor, batch-norm statistics included."""
    target, source = averaged.state_dict(), model.state_dict()
    floats = [name for name, value in target.items() if value.is_floating_point()]
    torch._foreach_lerp_([target[n] for n in floats], [source[n] for n in floats], 1 - decay)
    for name in target.keys() - set(floats):
        target[name].copy_(source[name])


def _decay_groups(backbone: nn.Module, head: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices and kernels only: biases, batch norms and PReLU slopes are left free."""
    parameters = [*backbone.parameters(), *head.parameters()]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def save_atomically(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(path)


def _diagnose(step: int, rows: NDArrayInt, embeddings: Tensor, head: CosineHead) -> str:
    broken = [name for name, p in head.named_parameters() if not bool(torch.isfinite(p).all())]
    if not bool(torch.isfinite(embeddings).all()):
        broken.insert(0, "embeddings")
    where = ", ".join(broken) or "the logits"
    return f"loss is not finite at step {step}: {where}; rows of the batch: {json.dumps(rows[:8].tolist())}..."


class LossLog:
    """A CSV with one line a step, cut back to the resumed step so that a replayed step is not written twice."""

    def __init__(self, path: Path, step: int, columns: Sequence[str]) -> None:
        kept: list[list[str]] = []
        if path.exists() and step > 0:
            with path.open(newline="", encoding="utf-8") as stream:
                kept = [row for row in csv.reader(stream) if row[0].isdigit() and int(row[0]) <= step]
        self._stream = path.open("w", newline="", encoding="utf-8", buffering=1)
        self._writer = csv.writer(self._stream)
        self._writer.writerow(["step", *columns])
        self._writer.writerows(kept)

    def close(self) -> None:
        self._stream.close()

    def add(self, step: int, *values: float) -> None:
        self._writer.writerow([step, *map(repr, values)])

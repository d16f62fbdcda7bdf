"""Network of a presentation attack detector, and its training loop."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from models.pack.manifest import LIVENESS_ALIGNMENT
from models.vision.alignment import CROP_SIZE_PX, Alignment
from training.backbones import ThinIResNet
from training.config import AugmentConfig
from training.data.augment import augment, draw_uniforms
from training.errors import NonFiniteLossError, RunInterruptedError
from training.liveness.data import LIVE, Presentations
from training.optimization.interrupts import stop_requests
from training.optimization.logs import RunLog
from training.optimization.loop import to_tensor
from training.optimization.run_folder import CHECKPOINT, load_checkpoint, save_checkpoint
from training.optimization.state import update_ema

SCALE: Final = CROP_SIZE_PX / LIVENESS_ALIGNMENT.size_px
TRAINED_ALIGNMENT: Final = Alignment(
    CROP_SIZE_PX, tuple((x * SCALE, y * SCALE) for x, y in LIVENESS_ALIGNMENT.template)
)
"""Crops of networks trained here: the margin of InsightFace's addon, at the size of `training.data.augment`."""
FEATURES: Final = 64
MAX_GRADIENT_NORM: Final = 5.0


@dataclass(frozen=True)
class LivenessLoopConfig:
    steps: int = 1000
    batch_size: int = 32
    """Half of a batch is live; the other half has as many crops of each instrument."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_steps: int = 50
    ema_decay: float = 0.99
    checkpoint_seconds: float = 120.0
    seed: int = 13


# No erased rectangles or masks: they would look like the edge of a picture.
AUGMENTATION: Final = AugmentConfig(low_resolution=0.1, saturation=0.3, rotation_deg=5.0, erase=0.0)


def build_network() -> nn.Module:
    """Return a network from (B, 3, 112, 112) RGB in [-1, 1] to (B, 1) logits of a live presentation."""
    return nn.Sequential(ThinIResNet(FEATURES, widths=(32, 64, 128), depths=(1, 1, 1)), nn.Linear(FEATURES, 1))


def fit_liveness(photos: Presentations, config: LivenessLoopConfig, output: Path) -> nn.Module:
    """Train, resuming from ``output/checkpoint.pt``; return the EMA network in evaluation mode.

    The batch of a step depends only on (seed, step), so a resumed run repeats the losses of an uninterrupted one.
    Raises NonFiniteLossError: the loss or a value of the checkpoint is NaN or infinite; the last checkpoint is kept.
    RunInterruptedError: Ctrl-C or SIGTERM arrived; a checkpoint of the last step is saved.
    """
    path = output / CHECKPOINT
    torch.manual_seed(config.seed)
    model = build_network()
    averaged = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    first = 0
    if path.exists():
        state = load_checkpoint(path)
        model.load_state_dict(state["model"])
        averaged.load_state_dict(state["averaged"])
        optimizer.load_state_dict(state["optimizer"])
        first = int(state["step"])
    kinds = [np.flatnonzero(photos.instruments == name) for name in sorted({LIVE, *photos.instruments.tolist()})]
    last_saved = time.monotonic()
    model.train()
    logs = RunLog(output, first, config.steps, config.batch_size, silent=False)
    with closing(logs), stop_requests() as stop_requested:
        for step in range(first, config.steps):
            rate = _learning_rate(step, config)
            for group in optimizer.param_groups:
                group["lr"] = rate
            rows = draw_rows(kinds, config.batch_size, config.seed, step)
            crops = augment(
                to_tensor(photos.crops_NHWC[rows]), draw_uniforms(len(rows), config.seed, step), AUGMENTATION
            )
            live = torch.from_numpy(photos.instruments[rows] == LIVE).float()
            loss = F.binary_cross_entropy_with_logits(model(crops)[:, 0], live)
            if not math.isfinite(value := loss.item()):
                raise NonFiniteLossError(f"loss is not finite at step {step}. Choose another --output")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            update_ema(averaged, model, min(config.ema_decay, (step + 1) / (step + 10)))
            logs.add(step + 1, {"loss": value, "learning_rate": rate})
            done, stop = step + 1 == config.steps, stop_requested()
            if done or stop or time.monotonic() - last_saved > config.checkpoint_seconds:
                networks = {"model": model.state_dict(), "averaged": averaged.state_dict()}
                save_checkpoint(path, {**networks, "optimizer": optimizer.state_dict(), "step": step + 1})
                last_saved = time.monotonic()
            if stop and not done:
                raise RunInterruptedError(
                    f"stopped at step {step + 1} of {config.steps}. The checkpoint is saved. Run the command again"
                )
    return averaged.eval()


def draw_rows(kinds: Sequence[NDArray[np.intp]], size: int, seed: int, step: int) -> NDArray[np.intp]:
    """Return (size,) rows of a batch: half from the first kind, and the other kinds in turn."""
    rng = np.random.default_rng((seed, step))
    live, *attacks = kinds
    counts = np.bincount([(step + i) % len(attacks) for i in range(size - size // 2)], minlength=len(attacks))
    drawn = [rng.choice(rows, count) for rows, count in zip(attacks, counts, strict=True)]
    return np.concatenate([rng.choice(live, size // 2), *drawn])


def _learning_rate(step: int, config: LivenessLoopConfig) -> float:
    warmup = min(1.0, (step + 1) / config.warmup_steps)
    return config.learning_rate * warmup * 0.5 * (1 + math.cos(math.pi * step / config.steps))

"""The detector's optimisation loop."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from training.detection.data import AnnotatedPhoto, training_crop
from training.detection.network import FaceDetector
from training.detection.targets import Faces, detection_loss
from training.logs import LossLog
from training.run_folder import save_atomically
from training.state import NonFiniteLossError, update_average

DETECTOR_CHECKPOINT = "detector.pt"


@dataclass(frozen=True)
class DetectorLoopConfig:
    steps: int = 14000
    batch_size: int = 16
    """Of the smallest crops; larger ones come in batches of as many pixels, of two at least."""
    crop_sizes_px: tuple[int, ...] = (256, 256, 384, 256, 256, 640)
    """The side of a batch's crops, by turns. The largest are for faces that fill a picture."""
    point_weight: float = 4.0
    """Of the landmarks in the loss, while faces and boxes are learned first ..."""
    late_point_weight: float = 16.0
    """... and once they are, after ``late_share`` of the steps."""
    late_share: float = 0.63
    point_beta: float = 0.02
    """In face sizes: smaller landmark errors count quadratically, which hardly corrects them."""
    face_sizes_px: tuple[float, float] = (10.0, 620.0)
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    warmup_steps: int = 200
    ema_decay: float = 0.998
    checkpoint_seconds: float = 120.0
    seed: int = 11


POLISH = DetectorLoopConfig(
    steps=2500,
    point_weight=16.0,
    point_beta=0.003,
    face_sizes_px=(14.0, 620.0),
    learning_rate=1e-3,
    seed=12,
)
"""A second run from the first one's weights, for landmarks that are nearly right."""


def fit_detector(
    model: FaceDetector, photos: list[AnnotatedPhoto], config: DetectorLoopConfig, output: Path
) -> FaceDetector:
    """Train, resuming from ``output/detector.pt``; return the averaged network in evaluation mode.

    Every step's crops are a function of (seed, step), so a resumed run sees what an uninterrupted one would.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / DETECTOR_CHECKPOINT
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    averaged = copy.deepcopy(model).requires_grad_(False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    first = 0
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        averaged.load_state_dict(state["averaged"])
        optimiser.load_state_dict(state["optimiser"])
        first = int(state["step"])
    model.train()
    last_saved = time.monotonic()
    with closing(LossLog(output / "losses.csv", first, ("score", "box", "points", "positives"))) as losses:
        bar = tqdm(batches(photos, config, first), initial=first, total=config.steps, unit="step")
        for step, (images, faces) in enumerate(bar, start=first):
            for group in optimiser.param_groups:
                group["lr"] = _rate(step, config)
            late = step >= config.late_share * config.steps
            weight = config.late_point_weight if late else config.point_weight
            loss, parts = detection_loss(model, images, faces, weight, config.point_beta)
            if not math.isfinite(float(loss.detach())):
                raise NonFiniteLossError(f"loss is not finite at step {step}: {parts}")
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimiser.step()
            update_average(averaged, model, min(config.ema_decay, (step + 1) / (step + 10)))
            losses.add(step + 1, *parts.values())
            bar.set_postfix({k: f"{v:.3f}" for k, v in parts.items() if k != "positives"})
            if time.monotonic() - last_saved > config.checkpoint_seconds or step + 1 == config.steps:
                save_atomically(
                    path,
                    {
                        "model": model.state_dict(),
                        "averaged": averaged.state_dict(),
                        "optimiser": optimiser.state_dict(),
                        "step": step + 1,
                    },
                )
                last_saved = time.monotonic()
    return averaged.eval()


def _rate(step: int, config: DetectorLoopConfig) -> float:
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def batches(
    photos: list[AnnotatedPhoto], config: DetectorLoopConfig, first: int
) -> Iterator[tuple[Tensor, list[Faces]]]:
    """Yield normalised (B, 3, s, s) batches and their faces, cut in threads ahead of the step that needs them."""

    def make(step: int) -> tuple[Tensor, list[Faces]]:
        rng = np.random.default_rng((config.seed, step))
        size = config.crop_sizes_px[step % len(config.crop_sizes_px)]
        smallest = min(config.crop_sizes_px)
        count = max(2, round(config.batch_size * (smallest / size) ** 2))
        cut = [training_crop(photos, size, config.face_sizes_px, rng) for _ in range(count)]
        images = torch.from_numpy(np.stack([image for image, _ in cut])).permute(0, 3, 1, 2)
        return ((images.float() - 127.5) / 128).contiguous(memory_format=torch.channels_last), [f for _, f in cut]

    ahead = 3
    with ThreadPoolExecutor(2) as pool:
        queue: list[Future[tuple[Tensor, list[Faces]]]] = [
            pool.submit(make, step) for step in range(first, min(first + ahead, config.steps))
        ]
        for step in range(first, config.steps):
            if step + ahead < config.steps:
                queue.append(pool.submit(make, step + ahead))
            yield queue.pop(0).result()

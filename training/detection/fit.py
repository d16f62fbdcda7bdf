"""Training loop of the detector."""

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

from training.detection.data import training_crop
from training.detection.network import FaceDetector
from training.detection.photos import TrainingPhotos
from training.detection.targets import FaceTargets, detection_loss
from training.errors import NonFiniteLossError
from training.optimization.logs import LossLog
from training.optimization.run_folder import save_checkpoint
from training.optimization.state import update_ema

DETECTOR_CHECKPOINT = "detector.pt"


@dataclass(frozen=True)
class DetectorLoopConfig:
    steps: int = 14000
    batch_size: int = 16
    """Number of the smallest crops. Batches of larger crops have as many pixels, and at least two crops."""
    crop_sizes_px: tuple[int, ...] = (256, 256, 384, 256, 256, 640)
    """Side of the crops, cycled by batch. The largest are for faces that fill a picture."""
    point_weight: float = 4.0
    """Weight of the landmark loss while faces and boxes are learned."""
    late_point_weight: float = 16.0
    """Weight of the landmark loss after ``late_share`` of the steps."""
    late_share: float = 0.63
    point_beta: float = 0.02
    """Landmark error, in face sizes, below which the loss is quadratic."""
    face_sizes_px: tuple[float, float] = (10.0, 620.0)
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    warmup_steps: int = 200
    ema_decay: float = 0.998
    checkpoint_seconds: float = 120.0
    seed: int = 11


LANDMARK_REFINEMENT = DetectorLoopConfig(
    steps=2500, point_weight=16.0, point_beta=0.003, face_sizes_px=(14.0, 620.0), learning_rate=1e-3, seed=12
)
"""Second run, from the weights of the first, that refines the landmarks."""


def fit_detector(model: FaceDetector, photos: TrainingPhotos, config: DetectorLoopConfig, output: Path) -> FaceDetector:
    """Train, resuming from ``output/detector.pt``; return the EMA network in evaluation mode.

    The crops of a step depend only on (seed, step), so resumed and uninterrupted runs see the same data. Raises
    NonFiniteLossError if the loss or a value of the checkpoint is NaN or infinite; the last checkpoint is kept.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / DETECTOR_CHECKPOINT
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    averaged = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    first = 0
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        averaged.load_state_dict(state["averaged"])
        optimizer.load_state_dict(state["optimizer"])
        first = int(state["step"])
    model.train()
    last_saved = time.monotonic()
    with closing(LossLog(output / "losses.csv", first, ("score", "box", "points", "positives"))) as losses:
        bar = tqdm(load_batches(photos, config, first), initial=first, total=config.steps, unit="step")
        for step, (images, faces) in enumerate(bar, start=first):
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(step, config)
            late = step >= config.late_share * config.steps
            weight = config.late_point_weight if late else config.point_weight
            loss, parts = detection_loss(model, images, faces, weight, config.point_beta)
            if not math.isfinite(float(loss.detach())):
                raise NonFiniteLossError(f"loss is not finite at step {step}: {parts}")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            update_ema(averaged, model, min(config.ema_decay, (step + 1) / (step + 10)))
            losses.add(step + 1, *parts.values())
            bar.set_postfix({k: f"{v:.3f}" for k, v in parts.items() if k != "positives"})
            if time.monotonic() - last_saved > config.checkpoint_seconds or step + 1 == config.steps:
                save_checkpoint(
                    path,
                    {
                        "model": model.state_dict(),
                        "averaged": averaged.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step + 1,
                    },
                )
                last_saved = time.monotonic()
    return averaged.eval()


def _learning_rate(step: int, config: DetectorLoopConfig) -> float:
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def load_batches(
    photos: TrainingPhotos, config: DetectorLoopConfig, first: int
) -> Iterator[tuple[Tensor, list[FaceTargets]]]:
    """Yield normalized (B, 3, s, s) batches with their faces, prepared in threads ahead of use."""

    def make(step: int) -> tuple[Tensor, list[FaceTargets]]:
        rng = np.random.default_rng((config.seed, step))
        size = config.crop_sizes_px[step % len(config.crop_sizes_px)]
        min_size = min(config.crop_sizes_px)
        count = max(2, round(config.batch_size * (min_size / size) ** 2))
        crops = [training_crop(photos, size, config.face_sizes_px, rng) for _ in range(count)]
        images = torch.from_numpy(np.stack([image for image, _ in crops])).permute(0, 3, 1, 2)
        return ((images.float() - 127.5) / 128).contiguous(memory_format=torch.channels_last), [f for _, f in crops]

    ahead = 3
    with ThreadPoolExecutor(2) as pool:
        queue: list[Future[tuple[Tensor, list[FaceTargets]]]] = [
            pool.submit(make, step) for step in range(first, min(first + ahead, config.steps))
        ]
        for step in range(first, config.steps):
            if step + ahead < config.steps:
                queue.append(pool.submit(make, step + ahead))
            yield queue.pop(0).result()

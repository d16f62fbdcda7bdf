"""Fit of a whole student to its teacher's embeddings and maps."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.vision.alignment import STANDARD_ALIGNMENT
from training.backbones.bottleneck_net import BottleneckNet
from training.imitation.teacher import Teacher
from training.imitation.views import Portraits, cut_views, draw_views
from training.optimization.descent import Descent
from training.optimization.loop import to_tensor
from training.optimization.run_folder import CHECKPOINT, append_json, load_checkpoint, save_checkpoint

log = logging.getLogger(__name__)
COSINES: Final = "joint.jsonl"
"""Mean cosine between student and teacher on held-out photos, a line each."""
MUON_RATE: Final = 1.2e-3
"""A rate of 0.006 destroyed in two minutes what the blocks had learned."""
ADAM_RATE: Final = 1.8e-4
ADAM_BETAS: Final = (0.9, 0.99)
WEIGHT_DECAY: Final = 0.3
WARMUP_STEPS: Final = 50
FITTED_MAPS: Final = range(6, 16)
"""Parts whose maps are fitted as well. Those before differ, since the student sees fewer pixels than its teacher."""
MAP_WEIGHT: Final = 0.7
TEST_BATCHES: Final = 10
TEST_BATCH: Final = 50


@dataclass(frozen=True)
class JointFit:
    """Settings of the fit of the whole student.

    Attributes:
        steps: optimizer steps.
        batch_size: views of a step.
        save_steps: steps between checkpoints.
        compiled: compile the student, which makes a step a quarter shorter and needs a C++ compiler.
    """

    steps: int
    batch_size: int = 16
    save_steps: int = 500
    compiled: bool = True


def fit_student(
    student: BottleneckNet,
    teacher: Teacher,
    portraits: Portraits,
    held_out: Portraits,
    fit: JointFit,
    output: Path,
    seed: int,
) -> None:
    """Fit all parts of the student at once, to the teacher's embeddings and maps of the same views.

    A step depends only on the weights and its number, so a run that was cut off goes on as if it had not been.

    Raises:
        NonFiniteLossError: the student became NaN or infinite; the last checkpoint is kept.
    """
    checkpoint = output / CHECKPOINT
    student.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    descent = Descent(student, MUON_RATE, ADAM_RATE, WEIGHT_DECAY, fit.steps, WARMUP_STEPS, ADAM_BETAS)
    compute = torch.compile(student.maps) if fit.compiled else student.maps
    first = 0
    if checkpoint.exists():
        state = load_checkpoint(checkpoint)
        student.load_state_dict(state["averaged"])
        descent.load_state_dict(state["descent"])
        first = int(state["step"])
    scales = [1 / float(maps.var()) for maps in _views(held_out, teacher, TEST_BATCH, np.random.default_rng(seed))[1]]
    drawn = (_views(held_out, teacher, TEST_BATCH, np.random.default_rng((seed, 0, i))) for i in range(TEST_BATCHES))
    test = [(crops, taught[-1]) for crops, taught in drawn]
    began, losses = time.monotonic(), []
    for step in range(first, fit.steps):
        crops, taught = _views(portraits, teacher, fit.batch_size, np.random.default_rng((seed, step)))
        with torch.autocast("cpu", torch.bfloat16):
            own = compute(crops)
        losses.append(descent.step(imitation_loss(own, taught, scales), step))
        done = step + 1
        if done % fit.save_steps == 0 or done == fit.steps:
            row = {"step": done, "loss": round(float(np.mean(losses)), 4), "held_out": _cosine(student, test)}
            state = {"averaged": student.state_dict(), "descent": descent.state_dict(), "images": len(portraits.crops)}
            save_checkpoint(checkpoint, {**state, "classes": torch.empty(0), **row})
            append_json(output / COSINES, {**row, "s": round(time.monotonic() - began)})
            log.info("%s", row)
            losses = []


def imitation_loss(own: list[Tensor], taught: list[Tensor], scales: list[float]) -> Tensor:
    """Return 1 - cos of the embeddings, and MAP_WEIGHT times the mean square errors of the FITTED_MAPS.

    Maps tell more of each photo than its embedding does, and keep the parts from drifting into another solution.

    Args:
        own: maps of the student after each part.
        taught: those of the teacher.
        scales: factors of the square errors: one by the variance of the teacher's map.
    """
    errors = [F.mse_loss(own[part].float(), taught[part]) * scales[part] for part in FITTED_MAPS]
    return 1 - F.cosine_similarity(own[-1].float(), taught[-1]).mean() + MAP_WEIGHT * torch.stack(errors).sum()


def _views(portraits: Portraits, teacher: Teacher, count: int, rng: np.random.Generator) -> tuple[Tensor, list[Tensor]]:
    """Return (count, 3, 112, 112) standard crops of random views, and the teacher's maps of its own crops of them."""
    views = list(draw_views(portraits, teacher.alignment, count, rng))
    crops = to_tensor(cut_views(views, STANDARD_ALIGNMENT)).contiguous(memory_format=torch.channels_last)
    return crops, [torch.from_numpy(values) for values in teacher.maps(cut_views(views, teacher.alignment))]


@torch.inference_mode()
def _cosine(student: BottleneckNet, test: list[tuple[Tensor, Tensor]]) -> float:
    cosines = [F.cosine_similarity(student(crops), taught) for crops, taught in test]
    return round(float(torch.cat(cosines).mean()), 5)

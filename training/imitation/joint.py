"""Fit of a whole student to its teacher's embeddings."""

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

from models.vision.alignment import align
from training.backbones.bottleneck_net import BottleneckNet
from training.imitation.descent import Descent
from training.imitation.teacher import Teacher
from training.imitation.views import Portraits, draw_views
from training.optimization.loop import to_tensor
from training.optimization.run_folder import CHECKPOINT, append_json, load_checkpoint, save_checkpoint

log = logging.getLogger(__name__)
COSINES: Final = "joint.jsonl"
"""Mean cosine between student and teacher on held-out photos, a line each."""
MUON_RATE: Final = 8e-4
"""A rate of 0.006 destroyed in two minutes what the blocks had learned."""
ADAM_RATE: Final = 1.2e-4
ADAM_BETAS: Final = (0.9, 0.99)
WEIGHT_DECAY: Final = 0.3
WARMUP_STEPS: Final = 50
HELD_OUT_VIEWS: Final = 500
HELD_OUT_BATCH: Final = 50


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


def fit_embeddings(
    student: BottleneckNet,
    teacher: Teacher,
    portraits: Portraits,
    held_out: Portraits,
    fit: JointFit,
    output: Path,
    seed: int,
) -> None:
    """Minimize the mean of 1 - cos(student, teacher).

    A step depends only on the weights and its number, so a run that was cut off goes on as if it had not been.

    Raises:
        NonFiniteLossError: the student became NaN or infinite; the last checkpoint is kept.
    """
    checkpoint = output / CHECKPOINT
    student.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    descent = Descent(student, MUON_RATE, ADAM_RATE, WEIGHT_DECAY, fit.steps, WARMUP_STEPS, ADAM_BETAS)
    network = torch.compile(student) if fit.compiled else student
    first = 0
    if checkpoint.exists():
        state = load_checkpoint(checkpoint)
        student.load_state_dict(state["averaged"])
        descent.load_state_dict(state["descent"])
        first = int(state["step"])
    test = _views(held_out, teacher, HELD_OUT_VIEWS, np.random.default_rng(seed))
    began, losses = time.monotonic(), []
    for step in range(first, fit.steps):
        own, taught = _views(portraits, teacher, fit.batch_size, np.random.default_rng((seed, step)))
        with torch.autocast("cpu", torch.bfloat16):
            embeddings = network(own.contiguous(memory_format=torch.channels_last))
        losses.append(descent.step(1 - F.cosine_similarity(embeddings.float(), taught).mean(), step))
        done = step + 1
        if done % fit.save_steps == 0 or done == fit.steps:
            row = {"step": done, "loss": round(float(np.mean(losses)), 4), "held_out": _cosine(student, *test)}
            state = {"averaged": student.state_dict(), "descent": descent.state_dict(), "images": len(portraits.crops)}
            save_checkpoint(checkpoint, {**state, "classes": torch.empty(0), **row})
            append_json(output / COSINES, {**row, "s": round(time.monotonic() - began)})
            log.info("%s", row)
            losses = []


def _views(portraits: Portraits, teacher: Teacher, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return (count, 3, 112, 112) standard crops at detected landmarks, and the teacher's embeddings of its own crops
    of the same photos at the true landmarks: so the student learns to make up for its detector."""
    own, taught = [], []
    for view in draw_views(portraits, teacher.alignment, count, rng):
        own.append(align(view.photo, view.detected[None], repeat_edge=True))
        taught.append(align(view.photo, view.true[None], teacher.alignment, repeat_edge=True))
    return to_tensor(np.concatenate(own)), torch.from_numpy(teacher.embed(np.concatenate(taught)))


@torch.inference_mode()
def _cosine(student: BottleneckNet, views: Tensor, taught: Tensor) -> float:
    embeddings = torch.cat([student(part) for part in torch.split(views, HELD_OUT_BATCH)])
    return round(float(F.cosine_similarity(embeddings, taught).mean()), 5)

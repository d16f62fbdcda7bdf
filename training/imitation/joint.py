"""Fit of a whole student to its teacher's embeddings and maps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from models.vision.alignment import STANDARD_ALIGNMENT, Alignment
from training.backbones.bottleneck_net import BottleneckNet
from training.imitation.teacher import Teacher
from training.imitation.views import Portraits, cut_views, draw_views
from training.optimization.descent import Descent
from training.optimization.loop import to_tensor
from training.optimization.run_folder import CHECKPOINT, restore, save_step

Crops = tuple[Tensor, Tensor]
COSINES: Final = "joint.jsonl"
"""Mean cosine between student and teacher on held-out photos, a line each."""
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
        batch_size: views of a step.
        muon_rate: first rate of Muon. At 0.006, 16 views a step destroyed in two minutes what the blocks had learned.
        adam_rate: first rate of Adam.
        workers: processes that draw views; none draws them between the steps.
        compiled: compile the student, which makes a step a quarter shorter and needs a C++ compiler.
    """

    steps: int
    batch_size: int = 16
    muon_rate: float = 1.2e-3
    adam_rate: float = 1.8e-4
    save_steps: int = 500
    workers: int = 0
    compiled: bool = True


class _Steps(Dataset[Crops]):
    """Crops of each step's views, for the student and for its teacher. They depend on the step's number alone."""

    def __init__(self, portraits: Portraits, alignment: Alignment, count: int, seed: tuple[int, ...]) -> None:
        self._portraits, self._alignment, self._count, self._seed = portraits, alignment, count, seed

    def __getitem__(self, step: int) -> Crops:
        rng = np.random.default_rng((*self._seed, step))
        views = list(draw_views(self._portraits, self._alignment, self._count, rng))
        own, taught = (cut_views(views, alignment) for alignment in (STANDARD_ALIGNMENT, self._alignment))
        return torch.from_numpy(own), torch.from_numpy(taught)

    def read(self, steps: range, workers: int, pinned: bool) -> Iterator[Crops]:
        """Yield the crops of steps in their order."""
        if workers:
            cv2.setNumThreads(1)  # A forked worker would wait for threads of a pool that it does not have.
        return iter(DataLoader(self, None, sampler=steps, num_workers=workers, pin_memory=pinned))


def fit_student(
    student: BottleneckNet,
    teacher: Teacher,
    portraits: Portraits,
    held_out: Portraits,
    fit: JointFit,
    output: Path,
    seed: int,
) -> None:
    """Fit all parts of the student at once, on the teacher's device, to its embeddings and maps of the same views.

    A step depends only on the weights and its number, so a run that was cut off goes on as if it had not been. Raises
    NonFiniteLossError: the student became NaN or infinite; the last checkpoint is kept.
    """
    checkpoint, device = output / CHECKPOINT, teacher.device
    student.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    descent = Descent(student, fit.muon_rate, fit.adam_rate, WEIGHT_DECAY, fit.steps, WARMUP_STEPS, ADAM_BETAS)
    compute = torch.compile(student.maps) if fit.compiled else student.maps
    first, pinned = restore(checkpoint, student, descent), device.type == "cuda"
    drawn = list(_Steps(held_out, teacher.alignment, TEST_BATCH, (seed, 0)).read(range(TEST_BATCHES), 0, False))
    test = [(own, teacher.maps(taught)[-1]) for own, taught in drawn]
    scales = [1 / float(maps.float().var()) for maps in teacher.maps(drawn[0][1])]
    views = _Steps(portraits, teacher.alignment, fit.batch_size, (seed,))
    began, losses = time.monotonic(), []
    for step, (crops, taught) in enumerate(views.read(range(first, fit.steps), fit.workers, pinned), first):
        x = to_tensor(crops, device).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            own = compute(x)
        losses.append(descent.step(imitation_loss(own, teacher.maps(taught), scales), step))
        done = step + 1
        if done % fit.save_steps == 0 or done == fit.steps:
            mean = round(float(torch.stack(losses).mean()), 4)
            row = {"step": done, "loss": mean, "held_out": _cosine(student, test)}
            weights = {"averaged": student.state_dict(), "descent": descent.state_dict()}
            state = {**weights, "images": len(portraits.crops), "classes": torch.empty(0), **row}
            save_step(checkpoint, COSINES, state, {**row, "s": round(time.monotonic() - began)})
            losses = []


def imitation_loss(own: list[Tensor], taught: list[Tensor], scales: list[float]) -> Tensor:
    """Return 1 - cos of the embeddings, and MAP_WEIGHT times the mean square errors of the FITTED_MAPS.

    Maps tell more of each photo than its embedding does, and keep the parts from drifting into another solution.
    ``scales``: factors of the square errors: one by the variance of the teacher's map.
    """
    errors = [F.mse_loss(own[part].float(), taught[part].float()) * scales[part] for part in FITTED_MAPS]
    return 1 - F.cosine_similarity(own[-1].float(), taught[-1].float()).mean() + MAP_WEIGHT * torch.stack(errors).sum()


@torch.inference_mode()
def _cosine(student: BottleneckNet, test: list[Crops]) -> float:
    device = next(student.parameters()).device
    cosines = [F.cosine_similarity(student(to_tensor(crops, device)), taught.float()) for crops, taught in test]
    return round(float(torch.cat(cosines).mean()), 5)

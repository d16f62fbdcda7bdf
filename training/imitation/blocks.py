"""Fit of a student to its teacher's maps, one block after another."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from training.backbones.bottleneck_net import BottleneckNet, Stem
from training.imitation.teacher import BATCH, Teacher
from training.imitation.views import Portraits, draw_crops
from training.optimization.descent import Descent
from training.optimization.loop import to_tensor
from training.optimization.run_folder import restore, save_step

log = logging.getLogger(__name__)
Half = NDArray[np.float16]
BLOCKS: Final = "blocks.pt"
"""Checkpoint of the fitted parts."""
ERRORS: Final = "blocks.jsonl"
"""Error of the student up to each part, a line each."""
HELD_OUT_VIEWS: Final = 500


@dataclass(frozen=True)
class BlockFit:
    """Settings of the fit of some blocks.

    Attributes:
        blocks: number of parts of the student that are fitted with these settings.
        steps: optimizer steps of each.
        views: number of views whose maps are kept in memory, in half precision.
        weight_decay: of Muon, per unit of the rate.
        start_steps: steps from each of STARTS before the best is chosen.
    """

    blocks: int
    steps: int
    views: int
    weight_decay: float
    start_steps: int = 500


BATCH_SIZE: Final = 4
"""Targets are exact and the student can meet them, so many small steps win over fewer with less noise."""
MUON_RATE: Final = 0.02
ADAM_RATE: Final = 0.02
STARTS: Final = ((-0.6, 1.0), (0.6, -1.0), (-0.6, -1.0), (0.25, 0.25))
"""First slopes of the PReLUs before and after a depthwise convolution."""


def fit_blocks(
    student: BottleneckNet,
    teacher: Teacher,
    portraits: Portraits,
    held_out: Portraits,
    fits: tuple[BlockFit, ...],
    output: Path,
    seed: int,
) -> None:
    """Fit each part of the student, given the student's own map before it, to the teacher's map after it.

    So each part mends what those before it lack. The student is saved after each part, and a run that was cut off goes
    on with the next one. Raises NonFiniteLossError: a part became NaN or infinite; the checkpoint of the parts before
    it is kept.
    """
    checkpoint = output / BLOCKS
    start = restore(checkpoint, student)
    student.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    first = views = 0
    for number, fit in enumerate(fits):
        parts = range(max(first, start), first + fit.blocks)
        first += fit.blocks
        if parts and fit.views != views:
            began, views = time.monotonic(), fit.views
            own, taught = _start_maps(student, teacher, portraits, views, parts[0], 100 * seed + number)
            own_test, taught_test = _start_maps(student, teacher, held_out, HELD_OUT_VIEWS, parts[0], 100 * seed + 99)
            log.info("%d views up to part %d in %.0f s", views, parts[0], time.monotonic() - began)
        for part in parts:
            began = time.monotonic()
            taught, taught_test = (_advance_teacher(teacher, part, maps) for maps in (taught, taught_test))
            if part == 0:
                cast(Stem, student.parts[0]).whiten(torch.from_numpy(own[:256]).float())
            _choose_start(student.parts[part], own, taught, fit, seed + part)
            _fit_part(student.parts[part], own, taught, fit, seed + part)
            own, own_test = (_advance_student(student.parts[part], maps) for maps in (own, own_test))
            difference = own_test.astype(np.float32) - taught_test.astype(np.float32)
            error = float((difference**2).mean() / taught_test.astype(np.float32).var())
            row = {"part": part, "steps": fit.steps, "error": round(error, 5), "s": round(time.monotonic() - began)}
            save_step(checkpoint, ERRORS, {"averaged": student.state_dict(), "step": part + 1}, row)


def _choose_start(part: nn.Module, own: Half, taught: Half, fit: BlockFit, seed: int) -> None:
    """Fit the part for a few steps from each of STARTS, and leave it at the best. The slopes of the PReLUs decide which
    minimum is found, and some are twice as high as others."""
    initial, found = {name: value.clone() for name, value in part.state_dict().items()}, []
    slopes = [layer for layer in part.modules() if isinstance(layer, nn.PReLU)]
    for start in STARTS:
        part.load_state_dict(initial)
        for layer, slope in zip(slopes, start, strict=False):
            nn.init.constant_(layer.weight, slope)
        loss = _fit_part(part, own, taught, replace(fit, steps=fit.start_steps), seed)
        found.append((loss, {name: value.clone() for name, value in part.state_dict().items()}))
    losses = [loss for loss, _ in found]
    log.info("starts %s", [round(loss, 4) for loss in losses])
    part.load_state_dict(found[int(np.argmin(np.nan_to_num(losses, nan=np.inf)))][1])


def _fit_part(part: nn.Module, own: Half, taught: Half, fit: BlockFit, seed: int) -> float:
    """Minimize the mean square error in units of the variance of the teacher's map, and return its last mean."""
    last: deque[float] = deque(maxlen=100)
    rng = np.random.default_rng(seed)
    descent = Descent(part, MUON_RATE, ADAM_RATE, fit.weight_decay, fit.steps)
    scale = 1 / float(taught[:256].astype(np.float32).var())
    for step in range(fit.steps):
        rows = rng.integers(0, len(own), BATCH_SIZE)
        x, wanted = (torch.from_numpy(maps[rows]).float() for maps in (own, taught))
        with torch.autocast("cpu", torch.bfloat16):
            y = part(x.contiguous(memory_format=torch.channels_last))
        last.append(float(descent.step(F.mse_loss(y.float(), wanted) * scale, step)))
    return float(np.mean(last))


def _start_maps(
    student: BottleneckNet, teacher: Teacher, portraits: Portraits, count: int, part: int, seed: int
) -> tuple[Half, Half]:
    """Return the student's and the teacher's maps before a part; before the first, the pixels that each takes."""
    own, taught, first = np.empty(0, np.float16), np.empty(0, np.float16), 0
    for views in draw_crops(portraits, teacher.alignment, count, seed):
        x, y = to_tensor(views), teacher.prepare(views)
        for before in range(part):
            y = teacher.advance(before, y)
        own_views = _infer(student.parts[:part], x)
        if first == 0:
            own, taught = (np.empty((count, *maps.shape[1:]), np.float16) for maps in (own_views, y))
        own[first : first + len(x)], taught[first : first + len(x)] = own_views, y
        first += len(x)
    return own, taught


def _batches(maps: Half) -> list[Half]:
    return [maps[first : first + BATCH] for first in range(0, len(maps), BATCH)]


def _advance_teacher(teacher: Teacher, part: int, maps: Half) -> Half:
    return np.concatenate([teacher.advance(part, batch).astype(np.float16) for batch in _batches(maps)])


def _advance_student(part: nn.Module, maps: Half) -> Half:
    return np.concatenate([_infer(part, torch.from_numpy(batch).float()) for batch in _batches(maps)])


@torch.inference_mode()
def _infer(part: nn.Module, x: Tensor) -> Half:
    with torch.autocast("cpu", torch.bfloat16):
        out: Tensor = part(x.contiguous(memory_format=torch.channels_last))
    return out.contiguous().half().numpy()

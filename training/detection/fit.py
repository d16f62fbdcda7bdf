"""Imitation of YuNet: one block after another, then neck and heads, then the whole detector."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from training.backbones.bottleneck_net import Stem
from training.data.identities import map_in_threads
from training.detection.crops import Photos, Pixels, draw_crop
from training.detection.network import FaceDetector, Outputs
from training.detection.teacher import DetectorTeacher
from training.optimization.descent import Descent
from training.optimization.run_folder import restore, save_step

Rows = NDArray[np.int64]
DETECTOR_CHECKPOINT: Final = "detector.pt"
BLOCKS: Final = "blocks.pt"
"""Checkpoint of the fitted blocks and neck."""
ERRORS: Final = "errors.jsonl"
"""Errors on held-out crops as the run proceeds."""
CROP_PX: Final = 320
SCALE_CROPS: Final = 100
"""Crops whose maps scale those of the teacher."""
HELD_OUT: Final = 200
BATCH: Final = 40
"""Crops per run of a network whose maps are kept."""
PATCH_BATCH: Final = 8
PATCH_CELLS: Final = 12
"""Side of the part of a map from which a block learns in one step: many small steps win, as for the recognizer."""
MARGIN_CELLS: Final = 2
"""Cells at a patch's sides that lack neighbors, so that they do not count, unless they are at the border of the map."""
NECK_BATCH: Final = 6
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 0.02, 0.02, 0.1
STEM_ADAM_RATE: Final = 0.005
JOINT_MUON_RATE, JOINT_ADAM_RATE = 6e-4, 2e-4
WARMUP_STEPS: Final = 50
MAP_WEIGHT: Final = 0.3
"""Weight of the blocks' maps beside the outputs, when the whole is fitted."""
POINT_WEIGHT: Final = 4.0
MIN_SCORE: Final = 0.1
"""Score of the teacher from which a cell's box and points count."""
ELSEWHERE: Final = 0.02
"""Weight of the class score where neither network sees a face: the teacher learned none there."""


@dataclass(frozen=True)
class DetectorFit:
    """Settings of the imitation.

    Attributes:
        crops: number of crops whose maps are kept in memory, in half precision, for blocks and neck.
        block_steps: steps of each block.
        neck_steps: steps of neck and heads.
        joint_steps: steps of the whole detector, each of ``joint_batch`` new crops.
    """

    crops: int = 3_000
    block_steps: int = 14_000
    neck_steps: int = 5_000
    joint_steps: int = 2_500
    joint_batch: int = 8
    save_steps: int = 500
    seed: int = 11


def fit_detector(photos: Photos, teacher: DetectorTeacher, fit: DetectorFit, output: Path) -> FaceDetector:
    """Fit or resume a detector that computes what the teacher does. Raises NonFiniteLossError: the detector became NaN
    or infinite; the last checkpoint is kept."""
    torch.manual_seed(fit.seed)
    student = FaceDetector()
    held_out = draw_crops(photos, HELD_OUT, fit.seed, 0)
    fit_blocks(student, photos, held_out, teacher, fit, output)
    fit_whole(student, photos, held_out, teacher, fit, output)
    return student.eval()


def fit_blocks(
    student: FaceDetector, photos: Photos, held_out: Pixels, teacher: DetectorTeacher, fit: DetectorFit, output: Path
) -> None:
    """Fit each block, given the student's own map before it, to the teacher's map after it; then the neck.

    So each block mends what those before it lack. The student is saved after each, and a run that was cut off goes on
    with the next one.
    """
    checkpoint, count = output / BLOCKS, len(student.parts)
    done = restore(checkpoint, student)
    if done > count:
        return
    crops = draw_crops(photos, fit.crops, fit.seed, 1)
    if done == 0:
        cast(Stem, student.parts[0]).whiten(to_tensor(crops[:BATCH]).float())
    own, own_test = to_tensor(crops), to_tensor(held_out)
    kept: list[Tensor] = []
    for number, part in enumerate(student.parts):
        began = time.monotonic()
        if number >= done:
            taught, wanted = _taught_map(teacher, crops, number), _taught_map(teacher, held_out, number)
            rate = STEM_ADAM_RATE if number == 0 else ADAM_RATE
            fit_part(part, own, taught, Descent(part, MUON_RATE, rate, WEIGHT_DECAY, fit.block_steps), fit, number)
            del taught
            error = float(F.mse_loss(_advance(part, own_test).float(), wanted.float()))
            row = {"part": number, "error": round(error, 5), "s": round(time.monotonic() - began)}
            save_step(checkpoint, ERRORS, {"averaged": student.state_dict(), "step": number + 1}, row)
        own, own_test = _advance(part, own), _advance(part, own_test)
        if number >= count - 3:
            kept.append(own)
    fit_neck(student.neck, kept, _taught_outputs(teacher, crops), fit)
    row = {"part": count, **measure(student, teacher, held_out)}
    save_step(checkpoint, ERRORS, {"averaged": student.state_dict(), "step": count + 1}, row)


def fit_part(part: nn.Module, own: Tensor, taught: Tensor, descent: Descent, fit: DetectorFit, seed: int) -> float:
    """Minimize the mean square error of a part on patches of maps, and return its last mean.

    Args:
        own: (N, C, H, W) maps before the part.
        taught: (N, c, h, w) maps after it, with a variance of one.
    """
    rng, last = np.random.default_rng((fit.seed, seed)), deque[float](maxlen=200)
    count, _, side, _ = taught.shape
    cells, factor = min(PATCH_CELLS + 2 * MARGIN_CELLS, side), own.shape[2] // side
    free = side - cells
    for step in range(fit.block_steps):
        rows = rng.integers(0, count, PATCH_BATCH)
        # A third of the corners are at a border: what a convolution finds there tells its bias from that of the next.
        corners = rng.integers(-(free // 5) - 1, free + free // 5 + 2, (PATCH_BATCH, 2)).clip(0, free)
        before, wanted = _patches(own, rows, corners, cells, factor), _patches(taught, rows, corners, cells)
        counted = torch.stack([_counted(y, x, cells, free) for y, x in corners.tolist()])[:, None]
        after = part(before)
        loss = ((after - wanted) ** 2 * counted).sum() / (counted.sum() * after.shape[1])
        last.append(float(descent.step(loss, step)))
    return float(np.mean(last))


def _patches(maps: Tensor, rows: Rows, corners: Rows, cells: int, factor: int = 1) -> Tensor:
    """Cut a square of each map, ``factor`` times as large and as far from the map's corner."""
    side, cut = cells * factor, zip(rows.tolist(), (corners * factor).tolist(), strict=True)
    parts = [maps[row, :, y : y + side, x : x + side].permute(1, 2, 0) for row, (y, x) in cut]
    return torch.stack(parts).permute(0, 3, 1, 2).float()


def _counted(y: int, x: int, cells: int, free: int) -> Tensor:
    """Return (cells, cells): 1 where a patch at this corner has all neighbors, or lies at the map's border."""
    counted = torch.zeros(cells, cells)
    first = [0 if corner == 0 else MARGIN_CELLS for corner in (y, x)]
    last = [cells if corner == free else cells - MARGIN_CELLS for corner in (y, x)]
    counted[first[0] : last[0], first[1] : last[1]] = 1
    return counted


def fit_neck(neck: nn.Module, own: list[Tensor], taught: Outputs, fit: DetectorFit) -> None:
    """Fit neck and heads to the teacher's outputs, given the student's own maps."""
    rng = np.random.default_rng((fit.seed, 99))
    descent = Descent(neck, MUON_RATE, ADAM_RATE / 2, WEIGHT_DECAY, fit.neck_steps, WARMUP_STEPS)
    for step in range(fit.neck_steps):
        rows = torch.from_numpy(rng.integers(0, len(own[0]), NECK_BATCH))
        outputs = neck([maps[rows].float() for maps in own])
        descent.step(output_loss(outputs, [[y[rows].float() for y in level] for level in taught]), step)


def output_loss(own: Outputs, taught: Outputs) -> Tensor:
    """Return the divergence of the scores and the distance of boxes and points, per face cell of the teacher. Boxes and
    points count in units of the face's size, by the teacher's score."""
    scores, lengths, faces = [], [], []
    for (cls, obj, box, points), (true_cls, true_obj, true_box, true_points) in zip(own, taught, strict=True):
        score = (true_cls.sigmoid() * true_obj.sigmoid()).sqrt()
        weight = score * (score > MIN_SCORE)
        somewhere = torch.maximum(true_obj.sigmoid(), obj.detach().sigmoid()) + ELSEWHERE
        scores.append((_divergence(obj, true_obj) + _divergence(cls, true_cls) * somewhere).sum())
        size = true_box[:, 2:].mean(1, keepdim=True).exp()
        moved = F.smooth_l1_loss(box[:, :2] / size, true_box[:, :2] / size, reduction="none", beta=0.02)
        grown = F.smooth_l1_loss(box[:, 2:], true_box[:, 2:], reduction="none", beta=0.02)
        points_moved = F.smooth_l1_loss(points / size, true_points / size, reduction="none", beta=0.02)
        distance = moved.mean(1) + grown.mean(1) + POINT_WEIGHT * points_moved.mean(1)
        lengths.append((distance * weight[:, 0]).sum())
        faces.append(weight.sum())
    return (torch.stack(scores).sum() + torch.stack(lengths).sum()) / torch.stack(faces).sum().clamp(min=1)


def _divergence(logits: Tensor, true_logits: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions."""
    share = true_logits.sigmoid()
    cross, own = (F.binary_cross_entropy_with_logits(x, share, reduction="none") for x in (logits, true_logits))
    return cross - own


def fit_whole(
    student: FaceDetector, photos: Photos, held_out: Pixels, teacher: DetectorTeacher, fit: DetectorFit, output: Path
) -> None:
    """Fit all blocks, neck and heads at once, to the teacher's maps and outputs. A step depends only on the weights and
    its number, so a run that was cut off goes on as if it had not been."""
    checkpoint = output / DETECTOR_CHECKPOINT
    student.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    descent = Descent(student, JOINT_MUON_RATE, JOINT_ADAM_RATE, WEIGHT_DECAY, fit.joint_steps, WARMUP_STEPS)
    steps = range(restore(checkpoint, student, descent), fit.joint_steps)
    drawn = map_in_threads(lambda step: draw_crops(photos, fit.joint_batch, fit.seed, 100 + step), steps, 1, ahead=3)
    began, losses = time.monotonic(), []
    for step, crops in zip(steps, drawn, strict=True):
        taught_maps, taught = teacher.run(crops)
        maps = student.maps(to_tensor(crops).float())
        errors = [F.mse_loss(y, wanted) for y, wanted in zip(maps, taught_maps, strict=True)]
        loss = output_loss(student.neck(maps[-3:]), taught) + MAP_WEIGHT * torch.stack(errors).sum()
        losses.append(float(descent.step(loss, step)))
        done = step + 1
        if done % fit.save_steps == 0 or done == fit.joint_steps:
            row = {"step": done, "loss": round(float(np.mean(losses)), 4), **measure(student, teacher, held_out)}
            state = {"averaged": student.state_dict(), "descent": descent.state_dict(), "step": done}
            save_step(checkpoint, ERRORS, state, {**row, "s": round(time.monotonic() - began)})
            losses = []


@torch.inference_mode()
def measure(student: FaceDetector, teacher: DetectorTeacher, crops: Pixels) -> dict[str, float]:
    """Return the student's output loss on held-out crops, and how many cells one network takes for faces and the other
    does not, as a share of the teacher's."""
    loss, missed, invented, faces = 0.0, 0, 0, 0
    batches = range(0, len(crops), BATCH)
    for first in batches:
        batch = crops[first : first + BATCH]
        own, (_, taught) = student.neck(student.maps(to_tensor(batch).float())[-3:]), teacher.run(batch)
        loss += float(output_loss(own, taught)) / len(batches)
        for (cls, obj, *_), (true_cls, true_obj, *_) in zip(own, taught, strict=True):
            seen, true = (a.sigmoid() * b.sigmoid() > 0.25 for a, b in ((cls, obj), (true_cls, true_obj)))
            missed += int((true & ~seen).sum())
            invented += int((seen & ~true).sum())
            faces += int(true.sum())
    return {
        "held_out": round(loss, 4),
        "missed": round(missed / max(1, faces), 4),
        "invented": round(invented / max(1, faces), 4),
    }


def draw_crops(photos: Photos, count: int, seed: int, stream: int) -> Pixels:
    """Return (count, CROP_PX, CROP_PX, 3) random crops."""
    with ThreadPoolExecutor() as pool:
        rngs = [np.random.default_rng((seed, stream, row)) for row in range(count)]
        return np.stack(list(pool.map(lambda rng: draw_crop(photos, CROP_PX, rng), rngs)))


def to_tensor(crops: Pixels) -> Tensor:
    """Return (B, 3, H, W) uint8 input of the detector, of (B, H, W, 3) crops."""
    return torch.from_numpy(crops).permute(0, 3, 1, 2)


@torch.inference_mode()
def _advance(part: nn.Module, maps: Tensor) -> Tensor:
    return _collect(len(maps), lambda rows: part(maps[rows].float()))


def _taught_map(teacher: DetectorTeacher, crops: Pixels, number: int) -> Tensor:
    return _collect(len(crops), lambda rows: teacher.map_after(number, crops[rows]))


def _collect(count: int, compute: Callable[[slice], Tensor]) -> Tensor:
    """Return the maps of all rows in half precision, computed BATCH rows at a time."""
    maps = torch.empty(0)
    for first in range(0, count, BATCH):
        rows = slice(first, min(first + BATCH, count))
        found = compute(rows)
        if first == 0:
            shape = (count, *found.shape[1:])
            maps = torch.empty(shape, dtype=torch.float16, memory_format=torch.channels_last)
        maps[rows] = found
    return maps


def _taught_outputs(teacher: DetectorTeacher, crops: Pixels) -> Outputs:
    runs = [teacher.run(crops[i : i + BATCH])[1] for i in range(0, len(crops), BATCH)]
    return [[torch.cat(parts).half() for parts in zip(*levels, strict=True)] for levels in zip(*runs, strict=True)]

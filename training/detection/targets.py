"""Which cell answers for which face, and what it costs to be wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from training.detection.network import SLOT_SIZES_PX, SLOTS, STRIDES, FaceDetector, cell_points, distances, offsets
from training.distributed import bf16_is_native

# Octaves between a face's size and a slot's nominal size within which the slot learns the face: neighbours overlap.
OCTAVES = 0.7
CENTRE_CELLS = 1.5
BOX_WEIGHT = 2.0


@dataclass(frozen=True)
class Faces:
    """The faces of one training image, in pixels: boxes (n, 4) as x0, y0, x1, y1; points (n, 5, 2); has_points (n,);
    ignore (n,): faces too small, cut or doubtful to be learned as face or as background."""

    boxes: Tensor
    points: Tensor
    has_points: Tensor
    ignore: Tensor


def assign(faces: Faces, height_px: int, width_px: int) -> tuple[Tensor, Tensor]:
    """Return for every cell and slot of all strides, concatenated: the index of its face or -1, and whether it is
    left out of the score loss. Where two faces claim a cell the smaller wins."""
    owners, ignored = [], []
    boxes = faces.boxes
    size = (boxes[:, 2:] - boxes[:, :2]).clamp(min=1e-3).prod(1).sqrt()
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    smallest, largest = SLOT_SIZES_PX[0][0], SLOT_SIZES_PX[-1][-1]
    octave = torch.log2(size.clamp(smallest, largest))
    for stride, sizes in zip(STRIDES, SLOT_SIZES_PX, strict=True):
        points = cell_points(height_px, width_px, stride, boxes.device)
        if not len(boxes):
            owners.append(torch.full((len(points),), -1))
            ignored.append(torch.zeros(len(points), dtype=torch.bool))
            continue
        slot_size = torch.tensor(sizes).repeat(len(points) // SLOTS)
        inside = ((points[:, None] > boxes[None, :, :2]) & (points[:, None] < boxes[None, :, 2:])).all(2)
        near = ((points[:, None] - centre[None]).abs() < CENTRE_CELLS * stride).all(2)
        # A face smaller than a cell may hold no cell point: its nearest one must do.
        nearest = F.one_hot(((points[:, None] - centre[None]).abs().amax(2)).argmin(0), len(points)).T.bool()
        nearest = nearest | nearest.roll(1, 0)
        fits = (torch.log2(slot_size)[:, None] - octave[None]).abs() <= OCTAVES
        positive = ((inside & near) | nearest) & fits & ~faces.ignore[None]
        area = torch.where(positive, size[None], torch.inf)
        best, owner = area.min(1)
        owners.append(torch.where(torch.isfinite(best), owner, -1))
        ignored.append((inside & faces.ignore[None]).any(1) & ~torch.isfinite(best))
    return torch.cat(owners), torch.cat(ignored)


def detection_loss(
    model: FaceDetector, images: Tensor, batch: list[Faces], point_weight: float, point_beta: float
) -> tuple[Tensor, dict[str, float]]:
    """Quality focal loss (X. Li et al., "Generalized Focal Loss", 2020, eq. 2) on scores, GIoU on boxes (Rezatofighi
    et al., 2019, eq. 3), smooth L1 on landmarks in units of the face size, quadratic below ``point_beta``. Returns the
    sum and its parts."""
    height, width = images.shape[2:]
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16_is_native()):
        raw = [(s.float(), b.float(), p.float()) for s, b, p in model.raw(images)]
    logits = torch.cat([s for s, _, _ in raw], 1).squeeze(2)
    levels = list(zip(raw, STRIDES, SLOT_SIZES_PX, strict=True))
    ltrb = torch.cat([distances(b, sizes) for (_, b, _), _, sizes in levels], 1)
    moved = torch.cat([offsets(p, sizes) for (_, _, p), _, sizes in levels], 1)
    cells = torch.cat([cell_points(height, width, stride, images.device) for stride in STRIDES])

    quality = torch.zeros_like(logits)
    weight = torch.ones_like(logits)
    predicted_boxes, true_boxes, predicted_points, true_points, sizes_px = [], [], [], [], []
    positives = torch.zeros_like(logits, dtype=torch.bool)
    for i, faces in enumerate(batch):
        owner, ignored = assign(faces, height, width)
        weight[i][ignored] = 0
        positive = owner >= 0
        positives[i] = positive
        mine = owner[positive]
        origin = cells[positive]
        sides = ltrb[i][positive]
        predicted_boxes.append(torch.cat([origin - sides[:, :2], origin + sides[:, 2:]], 1))
        true_boxes.append(faces.boxes[mine])
        with_points = faces.has_points[mine]
        predicted_points.append((moved[i][positive].reshape(-1, 5, 2) + origin[:, None])[with_points])
        true_points.append(faces.points[mine][with_points])
        true = faces.boxes[mine][with_points]
        sizes_px.append((true[:, 2:] - true[:, :2]).prod(1).sqrt())
    iou, giou = box_overlap(torch.cat(predicted_boxes), torch.cat(true_boxes))
    quality[positives] = iou.detach().clamp(min=0.05)
    count = positives.sum().clamp(min=1)
    focal = (quality - logits.sigmoid()).abs().pow(2) * weight
    score_loss = (focal * F.binary_cross_entropy_with_logits(logits, quality, reduction="none")).sum() / count
    box_loss = (1 - giou).sum() / count
    size = torch.cat(sizes_px)[:, None, None]
    point_loss = F.smooth_l1_loss(
        torch.cat(predicted_points) / size, torch.cat(true_points) / size, beta=point_beta, reduction="sum"
    ) / (10 * max(1, len(size)))
    total = score_loss + BOX_WEIGHT * box_loss + point_weight * point_loss
    return total, {
        "score": float(score_loss.detach()),
        "box": float(box_loss.detach()),
        "points": float(point_loss.detach()),
        "positives": int(count),
    }


def box_overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalised IoU of (n, 4) boxes, pair by pair."""
    lower, upper = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    shared = (upper - lower).clamp(min=0).prod(1)
    area = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - shared
    iou = shared / area.clamp(min=1e-6)
    hull = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).prod(1).clamp(min=1e-6)
    return iou, iou - (hull - area) / hull

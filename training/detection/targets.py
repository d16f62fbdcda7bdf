"""Assignment of faces to cells, and the detection loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from training.detection.network import SLOT_SIZES_PX, SLOTS, STRIDES, FaceDetector, cell_points, distances, offsets
from training.distributed import has_native_bf16

# Maximum difference between face size and nominal slot size; neighboring slots overlap.
MAX_SIZE_DIFFERENCE_OCTAVES = 0.7
MAX_CENTER_DISTANCE_CELLS = 1.5
BOX_WEIGHT = 2.0


@dataclass(frozen=True)
class FaceTargets:
    """Faces of one training image, in pixels.

    Attributes:
        boxes: (n, 4) x0, y0, x1, y1.
        points: (n, 5, 2) landmarks, valid where ``has_points`` (n,).
        ignore: (n,) faces too small, cut or doubtful to count as face or background.
    """

    boxes: Tensor
    points: Tensor
    has_points: Tensor
    ignore: Tensor


def assign_faces(faces: FaceTargets, height_px: int, width_px: int) -> tuple[Tensor, Tensor]:
    """Return for all cells and slots, strides concatenated: the face index or -1, and whether the score loss ignores
    it.

    The smaller face wins where two faces match a cell.
    """
    owners, ignored = [], []
    boxes = faces.boxes
    size = (boxes[:, 2:] - boxes[:, :2]).clamp(min=1e-3).prod(1).sqrt()
    center = (boxes[:, :2] + boxes[:, 2:]) / 2
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
        near = ((points[:, None] - center[None]).abs() < MAX_CENTER_DISTANCE_CELLS * stride).all(2)
        # A face smaller than a cell may contain no cell point: assign the nearest one.
        nearest = F.one_hot(((points[:, None] - center[None]).abs().amax(2)).argmin(0), len(points)).T.bool()
        nearest = nearest | nearest.roll(1, 0)
        fits = (torch.log2(slot_size)[:, None] - octave[None]).abs() <= MAX_SIZE_DIFFERENCE_OCTAVES
        positive = ((inside & near) | nearest) & fits & ~faces.ignore[None]
        area = torch.where(positive, size[None], torch.inf)
        best, owner = area.min(1)
        owners.append(torch.where(torch.isfinite(best), owner, -1))
        ignored.append((inside & faces.ignore[None]).any(1) & ~torch.isfinite(best))
    return torch.cat(owners), torch.cat(ignored)


def detection_loss(
    model: FaceDetector, images: Tensor, batch: list[FaceTargets], point_weight: float, point_beta: float
) -> tuple[Tensor, dict[str, float]]:
    """Return the weighted sum of the detection losses, and its parts.

    Quality focal loss on scores (X. Li et al., "Generalized Focal Loss", 2020, eq. 2), GIoU on boxes (Rezatofighi et
    al., 2019, eq. 3), smooth L1 on landmarks in units of the face size, quadratic below ``point_beta``.
    """
    height, width = images.shape[2:]
    with torch.autocast(images.device.type, torch.bfloat16, enabled=has_native_bf16()):
        raw = [(s.float(), b.float(), p.float()) for s, b, p in model.predict_raw(images)]
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
        owner, ignored = assign_faces(faces, height, width)
        weight[i][ignored] = 0
        positive = owner >= 0
        positives[i] = positive
        assigned = owner[positive]
        origin = cells[positive]
        sides = ltrb[i][positive]
        predicted_boxes.append(torch.cat([origin - sides[:, :2], origin + sides[:, 2:]], 1))
        true_boxes.append(faces.boxes[assigned])
        with_points = faces.has_points[assigned]
        predicted_points.append((moved[i][positive].reshape(-1, 5, 2) + origin[:, None])[with_points])
        true_points.append(faces.points[assigned][with_points])
        true = faces.boxes[assigned][with_points]
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
    """Return IoU and generalized IoU of (n, 4) boxes, pair by pair."""
    lower, upper = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    shared = (upper - lower).clamp(min=0).prod(1)
    area = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - shared
    iou = shared / area.clamp(min=1e-6)
    hull = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).prod(1).clamp(min=1e-6)
    return iou, iou - (hull - area) / hull

"""Annotated photos as training crops: every crop shows a face at a size drawn evenly over the octaves."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from training.config import ConfigError
from training.data.identities import read_rgb
from training.detection.targets import Faces

SMALLEST_PX = 8.0
"""Smaller faces are neither learned nor punished."""
NO_FACE_SHARE = 0.08
MIRRORED = [1, 0, 2, 4, 3]


@dataclass(frozen=True)
class AnnotatedPhoto:
    """One photo: ``image`` (H, W, 3) uint8 RGB; boxes (n, 4) x0, y0, x1, y1; points (n, 5, 2), NaN where unknown;
    ``doubtful`` (n,): faces a second detector sees and the annotation lacks."""

    file: Path
    image: NDArray[np.uint8]
    boxes: NDArray[np.float32]
    points: NDArray[np.float32]
    doubtful: NDArray[np.bool_]


def load_annotated(root: Path, split: str | None = None) -> list[AnnotatedPhoto]:
    """Read ``root/annotations.jsonl``: boxes where annotated by people (``boxes_xyxy``), landmarks from the listed
    detector's faces that overlap them; a photo without annotated boxes takes the detector's.

    Raises:
        ConfigError: the annotations are absent or a photo cannot be decoded.
    """
    annotations = root / "annotations.jsonl"
    if not annotations.is_file():
        raise ConfigError(f"{annotations} does not exist")
    rows = [json.loads(line) for line in annotations.read_text(encoding="utf-8").splitlines() if line]
    rows = [row for row in rows if split is None or row.get("split", "train") == split]
    with ThreadPoolExecutor() as pool:
        images = pool.map(lambda row: read_rgb(root / row["file"]), rows)
        return [_annotated(root / row["file"], image, row) for row, image in zip(rows, images, strict=True)]


def _annotated(file: Path, image: NDArray[np.uint8], row: dict[str, Any]) -> AnnotatedPhoto:
    seen = np.array([f["box_xyxy"] for f in row["yunet"]], np.float32).reshape(-1, 4)
    seen_points = np.array([f["landmarks"] for f in row["yunet"]], np.float32).reshape(-1, 5, 2)
    if "boxes_xyxy" not in row:
        return AnnotatedPhoto(file, image, seen, seen_points, np.zeros(len(seen), bool))
    boxes = np.array(row["boxes_xyxy"], np.float32).reshape(-1, 4)
    points = np.full((len(boxes), 5, 2), np.nan, np.float32)
    overlap = iou_matrix(boxes, seen)
    if overlap.size:
        best = overlap.argmax(1)
        matched = overlap[np.arange(len(boxes)), best] >= 0.4
        points[matched] = seen_points[best[matched]]
    extra = (overlap.max(0) < 0.3) if len(boxes) else np.ones(len(seen), bool)
    return AnnotatedPhoto(
        file,
        image,
        np.concatenate([boxes, seen[extra]]),
        np.concatenate([points, seen_points[extra]]),
        np.concatenate([np.zeros(len(boxes), bool), np.ones(int(extra.sum()), bool)]),
    )


def iou_matrix(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, 4) and (m, 4) boxes to (n, m) intersection over union."""
    lower = np.maximum(a[:, None, :2], b[None, :, :2])
    upper = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.clip(upper - lower, 0, None).prod(2)
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(1), (b[:, 2:] - b[:, :2]).prod(1)
    result: NDArray[np.float32] = (shared / np.maximum(area_a[:, None] + area_b[None] - shared, 1e-6)).astype(
        np.float32
    )
    return result


def training_crop(
    photo: AnnotatedPhoto, size_px: int, face_sizes_px: tuple[float, float], rng: np.random.Generator
) -> tuple[NDArray[np.uint8], Faces]:
    """Cut one varied (size_px, size_px, 3) crop with its faces: scaled, shifted, flipped, recoloured. One face, chosen
    by chance, gets a size drawn evenly over the octaves of ``face_sizes_px``."""
    certain = np.flatnonzero(~photo.doubtful & ((photo.boxes[:, 2:] - photo.boxes[:, :2]).min(1) >= 6))
    height, width = photo.image.shape[:2]
    if len(certain) and rng.random() > NO_FACE_SHARE:
        box = photo.boxes[rng.choice(certain)]
        side = math.sqrt(float((box[2:] - box[:2]).prod()))
        low, high = face_sizes_px
        wanted = math.exp(rng.uniform(math.log(low), math.log(min(high, size_px * 0.9))))
        # Enlarging a small face much would only teach blur.
        scale = min(wanted / side, 2.5)
        centre = (box[:2] + box[2:]) / 2
    else:
        scale = math.exp(rng.uniform(math.log(0.4), math.log(1.5)))
        centre = np.array([rng.uniform(0, width), rng.uniform(0, height)])
    stretch = math.exp(rng.normal(0, 0.05))
    scale_x, scale_y = scale * stretch, scale / stretch
    shift = rng.uniform(0.15, 0.85, 2) * size_px - centre * (scale_x, scale_y)
    flip = rng.random() < 0.5
    matrix = np.array([[scale_x, 0, shift[0]], [0, scale_y, shift[1]]])
    if flip:
        matrix[0] = [-scale_x, 0, size_px - 1 - shift[0]]
    source, placed = photo.image, matrix
    if scale < 0.5:
        # warpAffine has no area filter: shrink first, or small faces would be aliased as they never are when serving.
        source = np.asarray(cv2.resize(source, None, fx=scale_x, fy=scale_y, interpolation=cv2.INTER_AREA), np.uint8)
        placed = matrix / [source.shape[1] / width, source.shape[0] / height, 1.0]
    image = _recolour(np.asarray(cv2.warpAffine(source, placed, (size_px, size_px)), np.uint8), rng)

    corners = photo.boxes.reshape(-1, 2, 2) @ matrix[:, :2].T + matrix[:, 2]
    boxes = np.concatenate([corners.min(1), corners.max(1)], 1)
    points = photo.points @ matrix[:, :2].T + matrix[:, 2]
    if flip:
        points = points[:, MIRRORED]
    inside = np.clip(boxes, 0, size_px)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    visible = (inside[:, 2:] - inside[:, :2]).prod(1) / np.maximum(area, 1e-6)
    seen = visible > 0
    small = (boxes[:, 2:] - boxes[:, :2]).min(1) < SMALLEST_PX
    ignore = photo.doubtful | small | (visible < 0.4)
    known = np.isfinite(points).all((1, 2))
    return image, Faces(
        torch.from_numpy(boxes[seen].astype(np.float32)),
        torch.from_numpy(np.nan_to_num(points[seen]).astype(np.float32)),
        torch.from_numpy(known[seen]),
        torch.from_numpy(ignore[seen]),
    )


def _recolour(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    out = image.astype(np.float32)
    if rng.random() < 0.15:
        out[:] = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None]
    shift = (rng.uniform(-40, 40) + rng.normal(0, 8, 3)).astype(np.float32)
    out = (out - 128) * np.float32(rng.uniform(0.6, 1.4)) + 128 + shift
    if rng.random() < 0.15:
        out = np.asarray(cv2.GaussianBlur(out, (0, 0), rng.uniform(0.4, 1.5)), np.float32)
    if rng.random() < 0.15:
        out = out + rng.normal(0, rng.uniform(1, 12), out.shape).astype(np.float32)
    return np.clip(out, 0, 255).astype(np.uint8)

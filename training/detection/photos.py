"""Photos with annotated faces, by which detectors are measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.vision.detection import downscale
from training.config import ConfigError
from training.data.identities import map_in_threads, read_rgb

ANNOTATIONS: Final = "annotations.jsonl"
MAX_PHOTO_SIDE_PX: Final = 768
Annotation = Mapping[str, Any]


@dataclass(frozen=True)
class AnnotatedPhoto:
    """One photo with its faces.

    Attributes:
        image: (H, W, 3) uint8 RGB.
        boxes: (n, 4) x0, y0, x1, y1 in pixels.
        doubtful: (n,) faces that another detector (YuNet) found, and that are not annotated.
    """

    image: NDArray[np.uint8]
    boxes: NDArray[np.float32]
    doubtful: NDArray[np.bool_]


def list_annotated(root: Path) -> list[Annotation]:
    """Return the lines of the split ``val`` of ``root/annotations.jsonl``. Raises ConfigError if it is missing or
    damaged."""
    annotations = root / ANNOTATIONS
    if not annotations.is_file():
        raise ConfigError(f"{annotations} does not exist. Name a folder of annotated photos, such as DATA/wider")
    try:
        rows = [json.loads(line) for line in annotations.read_text(encoding="utf-8").splitlines() if line]
    except ValueError as error:
        raise ConfigError(f"{annotations} is not JSON lines: {error}") from error
    return [row for row in rows if row["split"] == "val"]


def read_annotated(root: Path, rows: Sequence[Annotation]) -> Iterator[AnnotatedPhoto]:
    """Yield the photos, scaled to at most MAX_PHOTO_SIDE_PX. Few are read ahead. Raises ConfigError if one cannot be
    decoded."""
    return map_in_threads(lambda row: _annotated(read_rgb(root / row["file"]), row), rows)


def _annotated(image: NDArray[np.uint8], row: Annotation) -> AnnotatedPhoto:
    boxes = np.array(row["boxes_xyxy"], np.float32).reshape(-1, 4)
    seen = np.array([face["box_xyxy"] for face in row["yunet"]], np.float32).reshape(-1, 4)
    extra = iou_matrix(boxes, seen).max(0) < 0.3 if len(boxes) else np.ones(len(seen), bool)
    faces = np.concatenate([boxes, seen[extra]])
    scale = min(1.0, MAX_PHOTO_SIDE_PX / max(image.shape[:2]))
    small = image if scale == 1 else downscale(image, scale)
    return AnnotatedPhoto(small, faces * np.float32(scale), np.arange(len(faces)) >= len(boxes))


def iou_matrix(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return (n, m) intersection over union of (n, 4) and (m, 4) boxes."""
    lower = np.maximum(a[:, None, :2], b[None, :, :2])
    upper = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.clip(upper - lower, 0, None).prod(2)
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(1), (b[:, 2:] - b[:, :2]).prod(1)
    result: NDArray[np.float32] = (shared / np.maximum(area_a[:, None] + area_b[None] - shared, 1e-6)).astype(
        np.float32
    )
    return result

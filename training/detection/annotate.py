"""Labels for photos without annotations: faces and landmarks as another detector finds them."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import CANVAS_BUCKETS_PX, Detector, Faces, suppress_overlaps
from models.vision.specs import DetectionSpec
from training.config import ConfigError
from training.data.folders import photos_below
from training.data.identities import map_in_threads, read_rgb
from training.detection.photos import ANNOTATIONS

log = logging.getLogger(__name__)
ENLARGED_SIDE_PX = 640
"""Photos with a longer side of at most this are searched at twice their size too, for small faces."""
MIN_SCORE = 0.3
"""Faces below ``training.detection.photos.MIN_FACE_SCORE`` are kept: training neither learns them nor takes them for
background."""


def annotate_photos(
    folder: Path,
    spec: DetectionSpec,
    exclude: Collection[str] = (),
    limit: int | None = None,
    replace: bool = False,
) -> int:
    """Write ``folder/annotations.jsonl``: a row for each photo below ``folder``, with the faces of a detector.

    Args:
        spec: the detector.
        exclude: names relative to the folder that are left out.
        limit: maximum number of photos, evenly spaced by name.
        replace: replace an existing file.

    Returns:
        The number of faces.

    Raises:
        ConfigError: the file exists, the folder has no photo, or one cannot be decoded. The file is then unchanged.
    """
    annotations = folder / ANNOTATIONS
    if annotations.exists() and not replace:
        raise ConfigError(f"{annotations} exists. Replace it with --replace")
    found = photos_below(folder)
    if found.warning is not None:
        log.warning(found.warning)
    files = [file for file in found.photos if file.relative_to(folder).as_posix() not in exclude]
    if not files:
        raise ConfigError(f"{folder} contains no photo. Name a folder of photos")
    if limit is not None and limit < len(files):
        files = [files[row] for row in np.linspace(0, len(files) - 1, limit).astype(int)]
    detector = Detector(OnnxNetwork(spec.path), spec, MIN_SCORE, (*CANVAS_BUCKETS_PX, 2 * ENLARGED_SIDE_PX))
    rows = list(tqdm(_rows(folder, files, detector), total=len(files), unit="photo"))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    partial = annotations.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(annotations)
    return sum(len(row["faces"]) for row in rows)


def _rows(folder: Path, files: list[Path], detector: Detector) -> Iterator[dict[str, Any]]:
    def annotate(file: Path) -> dict[str, Any]:
        found = find_at_two_sizes(read_rgb(file), detector)
        faces = [
            {
                "box_xyxy": np.round(box, 1).tolist(),
                "landmarks": np.round(points, 1).tolist(),
                "score": round(float(score), 3),
            }
            for box, points, score in zip(found.boxes_xyxy, found.landmarks_xy, found.scores, strict=True)
        ]
        return {"file": file.relative_to(folder).as_posix(), "faces": faces}

    return map_in_threads(annotate, files)


def find_at_two_sizes(image: NDArray[np.uint8], detector: Detector) -> Faces:
    """Return the faces of a photo, with small ones that are found only at twice its size."""
    (found,) = detector.detect([image])
    if max(image.shape[:2]) > ENLARGED_SIDE_PX:
        return found
    (enlarged,) = detector.detect([np.asarray(cv2.resize(image, None, fx=2, fy=2), np.uint8)])
    both = Faces(
        np.concatenate([found.boxes_xyxy, enlarged.boxes_xyxy / 2]),
        np.concatenate([found.landmarks_xy, enlarged.landmarks_xy / 2]),
        np.concatenate([found.scores, enlarged.scores]),
    )
    return both[suppress_overlaps(both.boxes_xyxy, both.scores)]

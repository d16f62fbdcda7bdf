"""Faces and photos that set the ranges of an INT8 network, and others that measure its loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.errors import PackError
from models.pack.unlabeled_photos import MIN_FACE_PX
from models.vision.alignment import Alignment, align
from models.vision.detection import Detector, downscale
from models.vision.photo_reading import PhotoReader

MAX_PHOTOS: Final = 300
MAX_CROPS: Final = 1024
MIN_FACES: Final = 24
Crops = NDArray[np.uint8]
Photos = list[NDArray[np.uint8]]


@dataclass(frozen=True, eq=False)
class QuantizationSamples:
    """Photos scaled to the detector's canvas, and (n, size_px, size_px, 3) crops of their faces, in two halves."""

    photos: Photos
    crops: Crops
    measured_photos: Photos
    measured_crops: Crops


def spread(folder: Path, reader: PhotoReader) -> Iterator[NDArray[np.uint8]]:
    """Yield at most MAX_PHOTOS readable photos below a folder, evenly spaced by name."""
    files = reader.find(folder)
    for row in np.unique(np.linspace(0, len(files) - 1, min(len(files), MAX_PHOTOS)).astype(int)):
        if (photo := reader.read(files[row])) is not None:
            yield photo


def collect_samples(
    photos: Iterable[NDArray[np.uint8]], detector: Detector, alignment: Alignment
) -> QuantizationSamples:
    """Detect the faces of (H, W, 3) RGB photos. Every second photo is kept for measuring.

    Raises:
        PackError: the photos have fewer than MIN_FACES faces.
    """
    halves: tuple[Photos, Photos] = [], []
    crops: tuple[list[Crops], list[Crops]] = [], []
    for number, photo in enumerate(photos):
        halves[number % 2].append(downscale(photo, detector.canvas(*photo.shape[:2]).scale))
        (faces,) = detector.detect([photo])
        sides = (faces.boxes_xyxy[:, 2:] - faces.boxes_xyxy[:, :2]).max(1)
        crops[number % 2].append(align(photo, faces.landmarks_xy[sides >= MIN_FACE_PX], alignment))
    none = np.zeros((0, alignment.size_px, alignment.size_px, 3), np.uint8)
    ranges, measured = (np.concatenate([none, *found])[:MAX_CROPS] for found in crops)
    if min(len(ranges), len(measured)) < MIN_FACES / 2:
        raise PackError(
            "photos",
            f"they show {len(ranges) + len(measured)} usable faces. Use photos with at least {MIN_FACES} faces, like "
            "those that the service will see",
        )
    return QuantizationSamples(halves[0], ranges, halves[1], measured)

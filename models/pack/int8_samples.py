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
from models.vision.photo_files import visible_subfolders
from models.vision.photo_reading import PhotoReader

MAX_PHOTOS: Final = 300
MAX_CROPS: Final = 1024
MIN_FACES: Final = 24
PHOTOS_PER_PERSON: Final = 4
MAX_PEOPLE: Final = 1000
MIN_PROBES: Final = 100
"""Fewest searches that can show a point of FNIR, or an FPIR of 1 %."""
Crops = NDArray[np.uint8]
Photos = list[NDArray[np.uint8]]


@dataclass(frozen=True, eq=False)
class QuantizationSamples:
    """Photos scaled to the detector's canvas, and (n, size_px, size_px, 3) crops of their faces, in two halves."""

    photos: Photos
    crops: Crops
    measured_photos: Photos
    measured_crops: Crops


@dataclass(frozen=True, eq=False)
class People:
    """Crops of known people: a gallery with one each, mated probes with their gallery rows, and strangers."""

    gallery: Crops
    mated: Crops
    mates: NDArray[np.int64]
    strangers: Crops


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


def read_people(folder: Path, detector: Detector, alignment: Alignment, reader: PhotoReader) -> People:
    """Read a folder with a folder of photos per person, at most PHOTOS_PER_PERSON of each.

    Two of three people with several photos form the gallery with their first photo; the others are strangers.

    Raises:
        PackError: there are fewer than MIN_PROBES mated probes or strangers.
    """
    gallery: list[Crops] = []
    mated: list[Crops] = []
    mates: list[int] = []
    strangers: list[Crops] = []
    people = visible_subfolders(folder)
    enrolled = 0
    for row in np.unique(np.linspace(0, len(people) - 1, min(len(people), MAX_PEOPLE)).astype(int)) if people else ():
        files = reader.find(people[row])[:PHOTOS_PER_PERSON]
        crops = [crop for file in files if (crop := _largest(reader.read(file), detector, alignment)) is not None]
        enrolled += len(crops) > 1
        if len(crops) < 2 or enrolled % 3 == 0:
            strangers += crops
            continue
        mated += crops[1:]
        mates += [len(gallery)] * (len(crops) - 1)
        gallery.append(crops[0])
    if min(len(mated), len(strangers)) < MIN_PROBES:
        raise PackError(
            "people",
            f"{folder} has {len(mated)} photos of enrolled people and {len(strangers)} of strangers with a face. At "
            f"least {MIN_PROBES} of each are needed: use a folder with more people, several photos of most",
        )
    return People(np.stack(gallery), np.stack(mated), np.array(mates), np.stack(strangers))


def _largest(photo: NDArray[np.uint8] | None, detector: Detector, alignment: Alignment) -> Crops | None:
    """Return the crop of the largest face of a photo; None if it has none, or there is no photo."""
    if photo is None:
        return None
    (faces,) = detector.detect([photo])
    return align(photo, faces.landmarks_xy[[faces.largest()]], alignment)[0] if len(faces) else None

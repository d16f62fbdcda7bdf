"""Photos of live faces and of presentation attacks, as crops for a liveness network.

A folder has the live photos, another one a sub-folder of photos per attack instrument: ``print``, ``screen``, ...
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from models.vision.alignment import STANDARD_ALIGNMENT, Alignment
from models.vision.detection import Detector
from models.vision.liveness import cut_crops, largest_scale
from models.vision.photo_files import printable_path, visible_subfolders
from models.vision.specs import BoxCrops
from training.config import ConfigError
from training.data.folders import photos_below
from training.data.identities import decode_rgb, read_bytes
from training.progress import track

LIVE: Final = "live"
"""Name of live presentations among instruments."""
SERVED_SCALE: Final = 1.5
"""Minimum scale at which the service decodes a JPEG file, as a multiple of the detector canvas's."""
REDUCED: Final[Mapping[float, int]] = MappingProxyType(
    {1 / 8: cv2.IMREAD_REDUCED_COLOR_8, 1 / 4: cv2.IMREAD_REDUCED_COLOR_4, 1 / 2: cv2.IMREAD_REDUCED_COLOR_2}
)
"""Modes that decode a JPEG file at the service's scales, in ascending order."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Presentations:
    """Presentations of faces to a camera.

    Attributes:
        crops_NHWC: (n, s, s, 3) uint8 RGB crops.
        instruments: (n,) attack instrument of each, or LIVE.
        people: (n,) person of each.
        not_judged: photos without a crop, by instrument: no face, or too much of the crop outside the photo.
    """

    crops_NHWC: NDArray[np.uint8]
    instruments: NDArray[np.str_]
    people: NDArray[np.str_]
    not_judged: dict[str, int]


def load_presentations(
    live: Path, attack: Path, detector: Detector, crop: Alignment | BoxCrops, max_outside: float
) -> Presentations:
    """Cut the largest face of each photo as the service does. Raises ConfigError: there is no instrument, one is named
    live, a photo cannot be read or decoded, or no face of an instrument can be judged.

    Args:
        live: folder of live photos; sub-folders are people.
        attack: folder with a sub-folder per instrument, each with photos or a folder per person.
        detector: detector that will serve with the network.
        crop: geometry of the crops.
        max_outside: largest share in [0, 1] of a crop outside its photo.
    """
    attacks = {printable_path(folder.name): folder for folder in visible_subfolders(attack)}
    if not attacks or LIVE in attacks:
        raise ConfigError(f"{attack} needs a sub-folder for each attack instrument, e.g. {attack}/print")
    instruments = {LIVE: live, **attacks}
    listed = [(name, *row) for name, folder in instruments.items() for row in _list_photos(folder)]
    crops, kept, not_judged = [], [], dict.fromkeys(instruments, 0)
    for name, person, file in track(listed, "detect and align", "photos"):
        cut = _cut_largest(file, detector, crop, max_outside)
        if cut is None:
            not_judged[name] += 1
        else:
            crops.append(cut)
            kept.append((name, person))
    for name, folder in instruments.items():
        if name not in {instrument for instrument, _ in kept}:
            raise ConfigError(f"{folder}: no photo has a face with enough of the photo around it")
    names, people = (np.array(column, np.str_) for column in zip(*kept, strict=True))
    return Presentations(np.stack(crops), names, people, not_judged)


def _list_photos(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield person and path of each photo. Without a folder, a person is named after the file."""
    files = photos_below(root)
    if files.warning is not None:
        log.warning(files.warning)
    for file in files.photos:
        inside = file.relative_to(root)
        yield printable_path(inside.parts[0] if len(inside.parts) > 1 else inside.stem), file


def _cut_largest(
    file: Path, detector: Detector, crop: Alignment | BoxCrops, max_outside: float
) -> NDArray[np.uint8] | None:
    encoded = read_bytes(file)
    image = decode_rgb(encoded, printable_path(file))
    (faces,) = detector.detect([image])
    if not len(faces):
        return None
    row, reduction = faces.largest(), 1.0
    box, points = faces.boxes_xyxy[row : row + 1], faces.landmarks_xy[row : row + 1]
    if encoded.startswith(b"\xff\xd8"):
        # The service decodes large JPEG files at a reduced scale, which removes the finest patterns of a screen.
        served = max(
            SERVED_SCALE * detector.canvas(*image.shape[:2]).scale,
            *(largest_scale(faces.boxes_xyxy, faces.landmarks_xy, wanted) for wanted in (STANDARD_ALIGNMENT, crop)),
        )
        reduction = next((r for r in REDUCED if r >= served), 1.0)
    if reduction < 1:
        image = decode_rgb(encoded, printable_path(file), REDUCED[reduction])
        box, points = ((xy + np.float32(0.5)) * np.float32(reduction) - np.float32(0.5) for xy in (box, points))
    return cut_crops(image, box, points, crop, max_outside)[0]

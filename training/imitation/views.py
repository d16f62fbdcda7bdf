"""Photos for the imitation of a teacher, and views of them as a camera and a detector would give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.vision.alignment import Alignment, align, similarity_transforms
from models.vision.detection import Detector
from training.data.cache import create_crop_cache
from training.data.identities import map_in_threads, read_rgb

Pixels = NDArray[np.uint8]
Points = NDArray[np.floating]
MARGIN_PX: Final = 16
"""Pixels around the teacher's crop that are kept, so that a moved crop shows the photo and no border."""
MIN_SCORE: Final = 0.6
MAX_LANDMARK_NOISE: Final = 0.05
"""Largest standard deviation that is added to a landmark, as a share of the distance of the eyes."""
MAX_SHIFT: Final = 0.5
"""Largest distance of two detectors' landmarks of one face, as a share of the distance of the eyes."""

TURNED: Final = 0.25
"""Turn of the head from which it is drawn more often: a fifth of FairFace."""
TURNED_WEIGHT: Final = 2


@dataclass(frozen=True)
class Portraits:
    """Crops with margins, aligned by the teacher's detector.

    Attributes:
        crops: (N, side, side, 3) uint8 RGB.
        detected: (N, 5, 2) landmarks in pixels of the crop, by the detector that the student is served with; NaN in
            photos without a face.
    """

    crops: Pixels
    detected: NDArray[np.float32]

    @property
    def found(self) -> NDArray[np.int64]:
        """Rows of photos with a face."""
        return np.flatnonzero(np.isfinite(self.detected).all((1, 2)))

    @cached_property
    def chances(self) -> NDArray[np.float64]:
        """Probability of each row in `draw_views`: turned heads are rare, and drawn more often."""
        weights = 1 + TURNED_WEIGHT * (head_turns(self.detected) > TURNED)
        return np.asarray(weights / weights.sum())

    def select(self, rows: NDArray[np.int64]) -> Portraits:
        """Return some of the portraits, in memory."""
        return Portraits(self.crops[rows], self.detected[rows])


@dataclass(frozen=True)
class View:
    """Portrait as a camera would give it: (side, side, 3) uint8 RGB, and its (5, 2) landmarks as a detector would find
    them."""

    photo: Pixels
    landmarks_xy: Points


def widen(alignment: Alignment) -> Alignment:
    """Return the alignment with MARGIN_PX on each side."""
    points = tuple((x + MARGIN_PX, y + MARGIN_PX) for x, y in alignment.template)
    return Alignment(alignment.size_px + 2 * MARGIN_PX, points)


def cut_portraits(
    files: Sequence[Path], true: Detector, served: Detector, alignment: Alignment, cache: Path, detected: Path
) -> None:
    """Write the face nearest the center of each photo, aligned by the landmarks of ``true``, to ``cache``; and to
    ``detected`` the landmarks of ``served``, the student's detector, or those of ``true`` if it misses the face."""
    wide = widen(alignment)

    def cut(file: Path) -> tuple[Pixels, Points] | None:
        image = read_rgb(file)
        points, own = (_central_landmarks(detector, image) for detector in (true, served))
        if points is None:
            return None
        (matrix,) = similarity_transforms(points[None], wide)
        seen = wide.template_xy if own is None else own @ matrix[:, :2].T + matrix[:, 2]
        if np.linalg.norm(seen - wide.template_xy, axis=1).max() > MAX_SHIFT * eye_distance(wide.template_xy):
            seen = wide.template_xy  # another face
        # FairFace's photos end at the hair: its mirror image is more like hair than a repeated edge is.
        crop = cv2.warpAffine(image, matrix, (wide.size_px,) * 2, borderMode=cv2.BORDER_REFLECT_101)
        return np.asarray(crop, np.uint8), seen

    with create_crop_cache(cache, detected, len(files), wide.size_px) as (crops, save_companion):
        found = np.full((len(files), 5, 2), np.nan, np.float32)
        for row, portrait in enumerate(tqdm(map_in_threads(cut, files), total=len(files), desc="cut", unit="photo")):
            if portrait is not None:
                crops[row], found[row] = portrait
        save_companion(found)


def _central_landmarks(detector: Detector, image: Pixels) -> Points | None:
    (faces,) = detector.detect([image])
    sure = faces[np.flatnonzero(faces.scores >= MIN_SCORE)]
    if not len(sure):
        return None
    height, width = image.shape[:2]
    return np.asarray(sure.landmarks_xy[sure.nearest(width / 2, height / 2)])


def eye_distance(points: Points) -> float:
    """Return the distance of the eyes of (5, 2) landmarks."""
    return float(np.linalg.norm(points[1] - points[0]))


def head_turns(points: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the (N,) turns of heads with (N, 5, 2) landmarks: 0 from the front, about 0.5 in profile. It is the nose's
    distance from the line between the middles of eyes and mouth, in distances of these middles."""
    eyes, mouth = points[:, :2].mean(1), points[:, 3:].mean(1)
    down, offset = mouth - eyes, points[:, 2] - eyes
    lengths = np.maximum(1e-6, (down**2).sum(1))
    return np.asarray(np.abs(down[:, 0] * offset[:, 1] - down[:, 1] * offset[:, 0]) / lengths, np.float64)


def make_view(crop: Pixels, detected: Points, alignment: Alignment, rng: np.random.Generator) -> View:
    """Return a portrait, with its landmarks and the teacher's alignment, as a camera would give it."""
    true: Points = widen(alignment).template_xy
    noise = rng.normal(size=true.shape) * rng.uniform(0, MAX_LANDMARK_NOISE) * eye_distance(true)
    if rng.random() < 0.07:
        crop = _wear_mask(crop, true, rng)
    detected = detected + noise
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
        detected = mirror_points(detected, crop.shape[1])
    photo = _lower_resolution(crop, rng)
    photo = _change_light(photo, rng)
    if rng.random() < 0.05:
        photo = _cover(photo, rng)
    if rng.random() < 0.3:
        quality = int(rng.integers(25, 96))
        _, data = cv2.imencode(".jpg", photo, [cv2.IMWRITE_JPEG_QUALITY, quality])
        photo = np.asarray(cv2.imdecode(data, cv2.IMREAD_UNCHANGED), np.uint8)
    return View(np.ascontiguousarray(photo), detected)


def mirror_points(points: Points, width: int) -> Points:
    """Return the (5, 2) landmarks of the mirror image."""
    mirrored = points[[1, 0, 2, 4, 3]]
    mirrored[:, 0] = width - 1 - mirrored[:, 0]
    return mirrored


def _lower_resolution(photo: Pixels, rng: np.random.Generator) -> Pixels:
    side, chance = len(photo), rng.random()
    if chance < 0.5:
        share = rng.uniform(0.25, 0.5) if chance < 0.12 else rng.uniform(0.5, 1)
        small = cv2.resize(photo, [max(8, round(side * share))] * 2, interpolation=cv2.INTER_AREA)
        photo = np.asarray(cv2.resize(small, (side, side), interpolation=cv2.INTER_LINEAR), np.uint8)
    if rng.random() < 0.1:
        photo = np.asarray(cv2.GaussianBlur(photo, (0, 0), rng.uniform(0.5, 1.6)), np.uint8)
    if rng.random() < 0.05:
        length, angle = rng.integers(3, 8), rng.uniform(0, np.pi)
        kernel = np.zeros((9, 9), np.float32)
        for t in np.linspace(-length / 2, length / 2, 33):
            kernel[round(4 + t * np.sin(angle)), round(4 + t * np.cos(angle))] = 1
        photo = np.asarray(cv2.filter2D(photo, -1, kernel / kernel.sum()), np.uint8)
    return photo


def _change_light(photo: Pixels, rng: np.random.Generator) -> Pixels:
    if rng.random() < 0.3:
        return photo
    pixels = photo.astype(np.float32) / 255
    if rng.random() < 0.05:
        pixels = np.repeat(pixels @ np.array([[0.299], [0.587], [0.114]], np.float32), 3, axis=2)
    pixels = pixels * rng.uniform(0.92, 1.08, 3).astype(np.float32)
    pixels = np.clip(pixels, 0, 1) ** np.float32(np.exp(rng.uniform(-0.4, 0.4)))
    pixels = (pixels - 0.5) * np.float32(rng.uniform(0.7, 1.3)) + np.float32(0.5 + rng.uniform(-0.15, 0.15))
    if rng.random() < 0.08:
        pixels *= np.float32(rng.uniform(0.15, 0.6))
    if rng.random() < 0.2:
        pixels += rng.standard_normal(pixels.shape, np.float32) * np.float32(rng.uniform(0.005, 0.04))
    return (np.clip(pixels, 0, 1) * 255 + 0.5).astype(np.uint8)


def _wear_mask(crop: Pixels, points: NDArray[np.floating], rng: np.random.Generator) -> Pixels:
    """Cover nose to chin with a cloth of one color."""
    eyes = points[1, 0] - points[0, 0]
    nose, mouth = points[2], points[3:].mean(0)
    top = nose[1] - rng.uniform(0.0, 0.35) * eyes
    half, chin = rng.uniform(0.85, 1.1) * eyes, mouth[1] + rng.uniform(0.5, 0.9) * eyes
    outline = np.array(
        [
            (nose[0], top),
            (nose[0] + half, top + rng.uniform(0.05, 0.3) * eyes),
            (nose[0] + 0.8 * half, chin - 0.4 * eyes),
            (nose[0], chin),
            (nose[0] - 0.8 * half, chin - 0.4 * eyes),
            (nose[0] - half, top + rng.uniform(0.05, 0.3) * eyes),
        ]
    )
    covered = crop.copy()
    cv2.fillPoly(covered, [np.round(outline * 8).astype(np.int32)], rng.integers(0, 256, 3).tolist(), cv2.LINE_AA, 3)
    return covered


def _cover(photo: Pixels, rng: np.random.Generator) -> Pixels:
    """Cover a rectangle with one color."""
    side = len(photo)
    height, width = rng.integers(side // 8, side // 2, 2)
    top, left = rng.integers(0, side - height), rng.integers(0, side - width)
    covered = photo.copy()
    covered[top : top + height, left : left + width] = rng.integers(0, 256, 3)
    return covered


def draw_views(portraits: Portraits, alignment: Alignment, count: int, rng: np.random.Generator) -> Iterator[View]:
    """Yield views of random portraits."""
    for row in rng.choice(len(portraits.crops), count, p=portraits.chances):
        yield make_view(portraits.crops[row], portraits.detected[row], alignment, rng)


def draw_crops(portraits: Portraits, alignment: Alignment, count: int, seed: int, batch: int = 32) -> Iterator[Pixels]:
    """Yield (batch, side, side, 3) uint8 RGB crops of random views, at detected landmarks."""
    drawn = draw_views(portraits, alignment, count, np.random.default_rng(seed))
    while views := list(islice(drawn, batch)):
        yield cut_views(views, alignment)


def cut_views(views: Sequence[View], alignment: Alignment) -> Pixels:
    """Return the (N, side, side, 3) uint8 RGB crops of views."""
    return np.concatenate([align(view.photo, view.landmarks_xy[None], alignment, repeat_edge=True) for view in views])

"""Calibration of a pack on a folder of photos without names."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from models.engines.selection import open_fp32
from models.errors import PackError
from models.pack.manifest import ModelPack
from models.risk.calibration import EDGES, histogram
from models.risk.unlabeled import calibration_document, separate
from models.runtime.network import Float
from models.vision.alignment import align
from models.vision.detection import Detector
from models.vision.face_search import find_faces
from models.vision.photo_reading import PhotoReader
from models.vision.recognition import Recognizer

MIN_FACES: Final = 300
MAX_FACES: Final = 5000
MIN_FACE_PX: Final = 32
THUMBNAIL_PX: Final = 16
MIN_COPY_CORRELATION: Final = 0.97
"""Correlation of two thumbnails, one possibly mirrored, of copies of one photo."""
MAX_PHOTO_FMR: Final = 1e-4
"""Two faces of one photo above this FMR are one person: a mirror or a collage."""
BLOCK_ROWS: Final = 256


def calibrate_without_names(pack: ModelPack, folder: Path, reader: PhotoReader) -> dict[str, Any]:
    """Return a calibration of a pack for the photos below ``folder`` that ``reader`` can read.

    Raises:
        PackError: there are fewer than MIN_FACES faces.
    """
    vectors, photos, skipped = _embed_folder(pack, folder, reader)
    if len(vectors) < MIN_FACES:
        raise PackError(
            "photos",
            f"{folder} has {len(vectors)} usable faces ({skipped} copies of photos skipped). Use a folder with "
            f"at least {MIN_FACES} faces, of as many people as possible",
        )
    document = calibrate_faces(vectors, photos)
    about = {"data": f"{folder.resolve().name}, without names", "date": date.today().isoformat(), "copies": skipped}
    return {**document, **about, "photos": len(np.unique(photos)), "recognizer": pack.recognition.fingerprint()}


def calibrate_faces(vectors: Float, photos: NDArray[np.int64]) -> dict[str, Any]:
    """Return the calibration for (n, d) unit vectors of faces in (n,) photos.

    Pairs within a photo count as different people, unless they are as similar as one person in a mirror or collage.
    """
    across, within = histogram(np.empty(0)), []
    for start in range(0, len(vectors), BLOCK_ROWS):
        rows = np.arange(start, min(start + BLOCK_ROWS, len(vectors)))
        similarities = np.clip(vectors[rows] @ vectors.T, -1, 1)
        later = np.arange(len(vectors))[None] > rows[:, None]
        one_photo = photos[rows][:, None] == photos[None]
        across += histogram(similarities[later & ~one_photo])
        within.append(similarities[later & one_photo])
    scores = separate(across, len(vectors))
    highest = float(np.interp(-MAX_PHOTO_FMR, -scores.rates, EDGES))
    pairs = np.concatenate(within)
    if len(pairs):
        scores = separate(across + histogram(pairs[pairs < highest]), len(vectors))
    return calibration_document(scores, len(vectors))


def _embed_folder(pack: ModelPack, folder: Path, reader: PhotoReader) -> tuple[Float, NDArray[np.int64], int]:
    """Return vectors and photo numbers of at most MAX_FACES faces, and the number of skipped copies."""
    detector = Detector(open_fp32(pack.detection.path), pack.detection)
    recognizer = Recognizer(open_fp32(pack.recognition.path), pack.recognition)
    vectors: list[Float] = []
    numbers: list[int] = []
    thumbnails = np.zeros((0, THUMBNAIL_PX**2), np.float32)
    skipped = 0
    photos = (photo for path in reader.find(folder) if (photo := reader.read(path)) is not None)
    for number, photo in enumerate(photos):
        pair = _thumbnails(photo)
        if len(thumbnails) and (thumbnails @ pair.T).max() > MIN_COPY_CORRELATION:
            skipped += 1
            continue
        thumbnails = np.concatenate([thumbnails, pair[:1]])
        faces = find_faces(detector, photo, "medium")
        sides = (faces.boxes_xyxy[:, 2:] - faces.boxes_xyxy[:, :2]).max(1)
        points = faces.landmarks_xy[sides >= MIN_FACE_PX]
        if len(points):
            vectors.append(recognizer.embed(align(photo, points, recognizer.alignment)))
            numbers += [number] * len(points)
        if len(numbers) >= MAX_FACES:
            break
    found = np.concatenate(vectors) if vectors else np.zeros((0, recognizer.dimension), np.float32)
    return found[:MAX_FACES], np.array(numbers[:MAX_FACES], np.int64), skipped


def _thumbnails(photo: NDArray[np.uint8]) -> Float:
    """Return the standardized gray thumbnail of a photo and of its mirror image, (2, THUMBNAIL_PX ** 2)."""
    gray = cv2.cvtColor(photo, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(gray, (THUMBNAIL_PX, THUMBNAIL_PX), interpolation=cv2.INTER_AREA).astype(np.float32)
    small -= small.mean()
    small /= max(float(np.linalg.norm(small)), 1e-6)
    return np.stack([small.ravel(), small[:, ::-1].ravel()])

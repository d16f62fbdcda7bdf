"""Detector evaluation: WIDER FACE, LFW central faces, face sizes and false alarms."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.vision.detection import Detections, Detector
from models.vision.face_search import find_faces
from training.data.identities import read_rgb
from training.data.subsampling import evenly_spaced_rows
from training.detection.photos import AnnotatedPhoto, iou_matrix, load_annotated
from training.evaluation.metrics import Bools, Floats, Ints, bootstrap

Interval = tuple[float, float]
MIN_CURVE_SCORE: Final = 0.02
FACE_SIZES_PX: Final = (16, 24, 32, 64, 128, 256, 400, 600)
SCALED_PHOTOS: Final = 60
SCALED_CANVAS_PX: Final = 640
UPSIDE_DOWN_INTERVAL: Final = 20
SYNTHETIC_IMAGES: Final = 100
"""Number of images of each kind of noise and texture."""
TILES_PER_SIDE: Final = 10
"""Tiles per side of a shuffled photo: 25 pixels each, less than a fifth of a face in LFW."""


@dataclass(frozen=True)
class DetectionMetrics:
    """Metrics on annotated faces with sides of at least ``min_side_px``; smaller ones are ignored.

    Attributes:
        recall, precision: at the served score threshold.
        recall_at_precision_90, score_at_precision_90: at the threshold for 90 % precision; same for 95 %.
        intervals: 95 % intervals over photos, by metric.
    """

    min_side_px: float
    faces: int
    recall: float
    precision: float
    recall_at_precision_90: float
    score_at_precision_90: float
    recall_at_precision_95: float
    score_at_precision_95: float
    intervals: dict[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Matches:
    """Matches of one photo: number of faces, (n,) scores of counted detections, (n,) whether each is a face."""

    faces: int
    scores: Floats
    hits: Bools


def evaluate_detector(
    detector: Detector, photos: Sequence[AnnotatedPhoto], min_side_px: float = 32.0
) -> DetectionMetrics:
    """Match detections to annotated boxes at IoU 0.5, best score first, each box once."""
    served = detector.min_score
    detector.min_score = MIN_CURVE_SCORE
    try:
        found = [detector.detect([photo.image])[0] for photo in tqdm(photos, desc="detect", unit="img")]
    finally:
        detector.min_score = served
    matches = [match(faces, photo, min_side_px) for faces, photo in zip(found, photos, strict=True)]

    def figures(rows: Ints) -> Floats:
        return _rates([matches[row] for row in rows], served)

    all_rows = np.arange(len(photos))
    recall, precision, recall_90, score_90, recall_95, score_95 = figures(all_rows).tolist()
    ends = list(zip(*(end.tolist() for end in bootstrap(figures, all_rows)), strict=True))
    return DetectionMetrics(
        min_side_px,
        sum(m.faces for m in matches),
        recall,
        precision,
        recall_90,
        score_90,
        recall_95,
        score_95,
        {"recall": ends[0], "precision": ends[1], "recall_at_precision_90": ends[2], "recall_at_precision_95": ends[4]},
    )


def match(faces: Detections, photo: AnnotatedPhoto, min_side_px: float) -> Matches:
    """Match the detections of one photo, best score first.

    Detections that match a doubtful or too small face, and too small detections without a match, are ignored.
    """
    annotated = ~photo.doubtful
    boxes = photo.boxes[annotated]
    counted = (boxes[:, 2:] - boxes[:, :2]).min(1) >= min_side_px if len(boxes) else np.zeros(0, bool)
    is_face = np.zeros(len(photo.boxes), bool)
    is_face[: len(boxes)] = counted
    overlap = iou_matrix(faces.boxes_xyxy, photo.boxes)
    free = np.ones(len(photo.boxes), bool)
    scores, hits = [], []
    for i in range(len(faces)):
        candidates = np.where(free, overlap[i], 0)
        best = int(candidates.argmax()) if len(candidates) else -1
        matched = best >= 0 and candidates[best] >= 0.5
        if matched:
            free[best] = False
        large = float((faces.boxes_xyxy[i, 2:] - faces.boxes_xyxy[i, :2]).min()) >= min_side_px
        if is_face[best] if matched else large:
            scores.append(float(faces.scores[i]))
            hits.append(matched)
    return Matches(int(counted.sum()), np.array(scores), np.array(hits, bool))


def _rates(matches: Sequence[Matches], served: float) -> Floats:
    """Return recall and precision at the served threshold, then recall and threshold at precision 90 and 95 %."""
    scores = np.concatenate([m.scores for m in matches])
    order = np.argsort(-scores, kind="stable")
    ordered, right = scores[order], np.concatenate([m.hits for m in matches])[order]
    recall = np.cumsum(right) / max(1, sum(m.faces for m in matches))
    precision = np.cumsum(right) / np.arange(1, len(right) + 1)
    at_served = int((ordered >= served).sum()) - 1
    figures = [float(recall[at_served]), float(precision[at_served])] if at_served >= 0 else [0.0, 1.0]
    for wanted in (0.9, 0.95):
        good = np.flatnonzero(precision >= wanted)
        figures += [float(recall[good[-1]]), float(ordered[good[-1]])] if len(good) else [0.0, 1.0]
    return np.array(figures)


@dataclass(frozen=True)
class CentralFaces:
    """Detection of the central face of LFW photos, at IoU 0.3 with the reference box.

    The landmark error is the mean distance over five points to the reference landmarks, in eye distances: median over
    photos and its 95 % interval over people. NaN if no face was found.
    """

    photos: int
    found: float
    median_landmark_error: float
    landmark_error_interval: Interval


@dataclass(frozen=True, eq=False)
class ReferenceFace:
    """Line of landmarks_yunet.csv: file relative to the images folder, box (4,) and points (5, 2) in pixels."""

    file: str
    box_xyxy: NDArray[np.float32]
    points_xy: Floats


def read_reference_faces(landmarks_csv: Path) -> list[ReferenceFace]:
    """Read the central face of every LFW photo, as found by the reference detector."""
    with landmarks_csv.open(newline="", encoding="utf-8") as stream:
        return [
            ReferenceFace(
                row["file"],
                np.array([float(row[k]) for k in ("x0", "y0", "x1", "y1")], np.float32),
                np.array([[float(row[f"l{axis}{i}"]) for axis in "xy"] for i in range(1, 6)]),
            )
            for row in csv.DictReader(stream)
        ]


def evaluate_central_faces(detector: Detector, landmarks_csv: Path, images: Path) -> CentralFaces:
    """Compare detections with the reference faces of LFW."""
    references = read_reference_faces(landmarks_csv)
    people, errors = [], []
    for reference in tqdm(references, desc="central faces", unit="img"):
        faces = detector.detect([read_rgb(images / reference.file)])[0]
        overlap = iou_matrix(faces.boxes_xyxy, reference.box_xyxy[None])[:, 0]
        if not len(faces) or overlap.max() < 0.3:
            continue
        distance = np.linalg.norm(reference.points_xy[0] - reference.points_xy[1])
        off = np.linalg.norm(faces.landmarks_xy[int(overlap.argmax())] - reference.points_xy, axis=1)
        errors.append(off.mean() / distance)
        people.append(reference.file.split("/")[0])
    if not errors:
        return CentralFaces(len(references), 0.0, float("nan"), (float("nan"), float("nan")))
    found = np.array(errors)
    low, high = bootstrap(lambda rows: np.array([np.median(found[rows])]), np.array(people))
    ends = (float(low[0]), float(high[0]))
    return CentralFaces(len(references), len(found) / len(references), float(np.median(found)), ends)


@dataclass(frozen=True)
class FalseAlarms:
    """Images with a detection at the served threshold, by kind.

    LFW photos upside down (where landmarks would be useless), noise, and textures made of LFW photos.
    """

    upside_down: int
    upside_down_photos: int
    noise: int
    noise_pictures: int
    textures: int
    texture_pictures: int


def evaluate_false_alarms(
    detector: Detector, landmarks_csv: Path, images: Path, made: int = SYNTHETIC_IMAGES
) -> FalseAlarms:
    """Count false alarms. The images are the same for every detector, ``made`` of each kind."""
    files = [images / reference.file for reference in read_reference_faces(landmarks_csv)]

    def alarms(pictures: Iterator[NDArray[np.uint8]], what: str) -> tuple[int, int]:
        seen = [len(detector.detect([picture])[0]) > 0 for picture in tqdm(pictures, desc=what, unit="img")]
        return sum(seen), len(seen)

    upside_down = (np.ascontiguousarray(read_rgb(file)[::-1, ::-1]) for file in files[::UPSIDE_DOWN_INTERVAL])
    sample = [files[i] for i in np.linspace(0, len(files) - 1, made).astype(int)]
    return FalseAlarms(
        *alarms(upside_down, "upside down"),
        *alarms(noise(made, np.random.default_rng(0)), "noise"),
        *alarms(textures(sample, np.random.default_rng(1)), "textures"),
    )


def noise(count: int, rng: np.random.Generator, side: int = 250) -> Iterator[NDArray[np.uint8]]:
    """Yield white and pink noise (amplitude 1/f, as in photos) in color, over the full range."""
    fy, fx = np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side)[None]
    amplitude = 1 / np.maximum(np.hypot(fy, fx), 1 / side)
    for _ in range(count):
        yield rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        spectrum = np.fft.fft2(rng.normal(size=(side, side, 3)), axes=(0, 1)) * amplitude[..., None]
        yield _stretched(np.fft.ifft2(spectrum, axes=(0, 1)).real)


def textures(files: Sequence[Path], rng: np.random.Generator) -> Iterator[NDArray[np.uint8]]:
    """Yield each photo with random phases, equal for all colors, and as shuffled tiles."""
    for file in files:
        photo = read_rgb(file)
        height, width = photo.shape[:2]
        turn = np.exp(1j * np.angle(np.fft.fft2(rng.normal(size=(height, width)))))
        turn[0, 0] = 1  # keep the mean color
        spectrum = np.fft.fft2(photo.astype(np.float64), axes=(0, 1)) * turn[..., None]
        yield np.clip(np.fft.ifft2(spectrum, axes=(0, 1)).real, 0, 255).astype(np.uint8)
        h, w = height // TILES_PER_SIDE, width // TILES_PER_SIDE
        tiles = (
            photo[: h * TILES_PER_SIDE, : w * TILES_PER_SIDE]
            .reshape(TILES_PER_SIDE, h, TILES_PER_SIDE, w, 3)
            .swapaxes(1, 2)
            .reshape(-1, h, w, 3)
        )
        shuffled = rng.permutation(tiles).reshape(TILES_PER_SIDE, TILES_PER_SIDE, h, w, 3).swapaxes(1, 2)
        yield np.ascontiguousarray(shuffled.reshape(h * TILES_PER_SIDE, w * TILES_PER_SIDE, 3))


def _stretched(values: Floats) -> NDArray[np.uint8]:
    low, high = np.quantile(values, [0.01, 0.99])
    return np.asarray(np.clip(255 * (values - low) / (high - low), 0, 255), np.uint8)


def evaluate_sizes(detector: Detector, landmarks_csv: Path, images: Path) -> dict[str, float]:
    """Return the recall at IoU 0.5 by the longer side of the face in pixels.

    LFW photos are scaled onto the center of a black 640x640 canvas, and detected as in an enrollment.
    """
    references = read_reference_faces(landmarks_csv)
    chosen = [references[row] for row in evenly_spaced_rows(len(references), SCALED_PHOTOS)]
    found = dict.fromkeys(FACE_SIZES_PX, 0)
    for reference in tqdm(chosen, desc="sizes", unit="img"):
        photo = read_rgb(images / reference.file)
        for size in FACE_SIZES_PX:
            canvas, box = _scale_to_size(photo, reference.box_xyxy, size)
            faces = find_faces(detector, canvas, "medium")
            found[size] += bool(len(faces) and iou_matrix(faces.boxes_xyxy, box[None]).max() >= 0.5)
    return {str(size): count / len(chosen) for size, count in found.items()}


def _scale_to_size(
    photo: NDArray[np.uint8], box_xyxy: NDArray[np.float32], size_px: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Scale a photo so that the box's longer side is ``size_px``. Return the centered canvas and the box."""
    scale = size_px / float((box_xyxy[2:] - box_xyxy[:2]).max())
    if scale < 1:
        photo = np.asarray(cv2.resize(photo, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA), np.uint8)
    drawn = 1.0 if scale < 1 else scale
    box = box_xyxy * scale
    shift = SCALED_CANVAS_PX / 2 - (box[:2] + box[2:]) / 2
    matrix = np.array([[drawn, 0, shift[0]], [0, drawn, shift[1]]])
    canvas = cv2.warpAffine(photo, matrix, (SCALED_CANVAS_PX, SCALED_CANVAS_PX), flags=cv2.INTER_LINEAR)
    placed = np.clip(box + np.tile(shift, 2), 0, SCALED_CANVAS_PX)
    return np.asarray(canvas, np.uint8), placed.astype(np.float32)


def evaluate_detection(detector: Detector, data: Path) -> dict[str, Any]:
    """Run all detector evaluations. ``data`` contains lfw/ and wider/."""
    reference, images = data / "lfw" / "landmarks_yunet.csv", data / "lfw" / "images"
    wider = load_annotated(data / "wider", "val")
    return {
        "counts": {"wider_photos": len(wider)},
        "wider_val": asdict(evaluate_detector(detector, wider)),
        "lfw_central_faces": asdict(evaluate_central_faces(detector, reference, images)),
        "false_alarms": asdict(evaluate_false_alarms(detector, reference, images)),
        "face_sizes_found": evaluate_sizes(detector, reference, images),
    }

"""Detector evaluation: WIDER FACE, and the central faces of LFW."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.vision.detection import Detections, Detector
from training.data.identities import read_rgb
from training.data.subsampling import evenly_spaced_rows
from training.detection.photos import AnnotatedPhoto, iou_matrix, list_annotated, read_annotated
from training.evaluation.metrics import Bools, Floats, Ints, bootstrap
from training.progress import track

Interval = tuple[float, float]
MIN_CURVE_SCORE: Final = 0.02
MAX_CENTRAL_FACES: Final = 1000
"""Photos of LFW, evenly spaced, on which landmarks are compared."""


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
    detector: Detector, photos: Iterable[AnnotatedPhoto], min_side_px: float = 32.0
) -> DetectionMetrics:
    """Match detections to annotated boxes at IoU 0.5, best score first, each box once. Of ``photos`` that are read one
    by one, one is kept at a time."""
    served = detector.min_score
    detector.min_score = MIN_CURVE_SCORE
    try:
        matches = [match(detector.detect([photo.image])[0], photo, min_side_px) for photo in photos]
    finally:
        detector.min_score = served

    def figures(rows: Ints) -> Floats:
        return _rates([matches[row] for row in rows], served)

    all_rows = np.arange(len(matches))
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


def evaluate_central_faces(detector: Detector, landmarks_csv: Path, images: Path) -> CentralFaces:
    """Compare detections with the central faces of at most `MAX_CENTRAL_FACES` photos of LFW, as the reference detector
    found them: lines of landmarks_yunet.csv with a file below ``images``, a box and five points in pixels."""
    with landmarks_csv.open(newline="", encoding="utf-8") as stream:
        listed = list(csv.DictReader(stream))
    references = [listed[row] for row in evenly_spaced_rows(len(listed), MAX_CENTRAL_FACES)]
    people, errors = [], []
    for reference in track(references, "landmarks", "photos"):
        box = np.array([[float(reference[end]) for end in ("x0", "y0", "x1", "y1")]], np.float32)
        points = np.array([[float(reference[f"l{axis}{i}"]) for axis in "xy"] for i in range(1, 6)])
        faces = detector.detect([read_rgb(images / reference["file"])])[0]
        overlap = iou_matrix(faces.boxes_xyxy, box)[:, 0]
        if not len(faces) or overlap.max() < 0.3:
            continue
        off = np.linalg.norm(faces.landmarks_xy[int(overlap.argmax())] - points, axis=1)
        errors.append(off.mean() / np.linalg.norm(points[0] - points[1]))
        people.append(reference["file"].split("/")[0])
    if not errors:
        return CentralFaces(len(references), 0.0, float("nan"), (float("nan"), float("nan")))
    found = np.array(errors)
    low, high = bootstrap(lambda rows: np.array([np.median(found[rows])]), np.array(people))
    ends = (float(low[0]), float(high[0]))
    return CentralFaces(len(references), len(found) / len(references), float(np.median(found)), ends)


def evaluate_detection(detector: Detector, data: Path) -> dict[str, Any]:
    """Run all detector evaluations. ``data`` contains lfw/ and wider/."""
    reference, images = data / "lfw" / "landmarks_yunet.csv", data / "lfw" / "images"
    rows = list_annotated(data / "wider")
    photos = track(read_annotated(data / "wider", rows), "WIDER", "photos", len(rows))
    return {
        "counts": {"wider_photos": len(rows)},
        "wider_val": asdict(evaluate_detector(detector, photos)),
        "lfw_central_faces": asdict(evaluate_central_faces(detector, reference, images)),
    }

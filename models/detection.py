"""Photos to faces: boxes, five landmarks, scores. SCRFD and YuNet heads, decoded for a whole batch at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from models.errors import PackError
from models.network import Float, Network
from models.pack import DetectionSpec, HeadKind, Normalisation
from models.runtime import bucket

CANVAS_BUCKETS_PX: Final = (256, 384, 512, 640)
DEFAULT_SCORE: Final = 0.5
NMS_IOU: Final = 0.4
MAX_CANDIDATES: Final = 2000
"""Per photo, best first: bounds the quadratic work of suppression on hostile input."""


@dataclass(frozen=True, eq=False)
class Faces:
    """The faces of one photo, best score first, in pixels of that photo.

    boxes_xyxy (n, 4) x0, y0, x1, y1; landmarks_xy (n, 5, 2) left eye, right eye, nose, left and right mouth corner as
    seen in the image; scores (n,) in 0..1.
    """

    boxes_xyxy: Float
    landmarks_xy: Float
    scores: Float

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: NDArray[np.intp] | slice) -> Faces:
        return Faces(self.boxes_xyxy[rows], self.landmarks_xy[rows], self.scores[rows])

    def areas(self) -> Float:
        sides = np.clip(self.boxes_xyxy[:, 2:] - self.boxes_xyxy[:, :2], 0, None)
        return np.asarray(sides.prod(1), np.float32)

    def largest(self) -> int:
        """Row of the face with the largest box.

        Raises:
            ValueError: there is no face.
        """
        return int(self.areas().argmax())

    def nearest(self, x: float, y: float) -> int:
        """Row of the face whose box centre is nearest a point."""
        centres = (self.boxes_xyxy[:, :2] + self.boxes_xyxy[:, 2:]) / 2
        return int(((centres - (x, y)) ** 2).sum(1).argmin())


@dataclass(frozen=True, eq=False)
class Candidates:
    """Every cell's prediction for a batch: scores (B, n), boxes (B, n, 4), landmarks (B, n, 5, 2), canvas pixels."""

    scores: Float
    boxes: Float
    landmarks: Float


class Head(Protocol):
    """Turns a network's raw outputs into candidates."""

    def decode(self, outputs: Sequence[Float], height_px: int, width_px: int) -> Candidates: ...


def cell_points(height_px: int, width_px: int, stride: int, slots: int) -> Float:
    """(h * w * slots, 2) x, y of every cell's corner, slots of a cell side by side."""
    ys, xs = np.mgrid[: height_px // stride, : width_px // stride]
    cells = np.stack([xs, ys], -1).reshape(-1, 1, 2) * stride
    return np.broadcast_to(cells, (len(cells), slots, 2)).reshape(-1, 2).astype(np.float32)


class SCRFDHead:
    """J. Guo et al., 2021. Nine outputs (strides 8, 16, 32; two slots) or fifteen (to 128; one slot): all scores,
    then all box distances, then all landmark offsets, in stride units."""

    def __init__(self, output_count: int) -> None:
        match output_count:
            case 9:
                self.strides: tuple[int, ...] = (8, 16, 32)
                self.slots = 2
            case 15:
                self.strides = (8, 16, 32, 64, 128)
                self.slots = 1
            case _:
                raise PackError("tasks.detection.file", f"{output_count} outputs: an SCRFD with landmarks has 9 or 15")

    def decode(self, outputs: Sequence[Float], height_px: int, width_px: int) -> Candidates:
        levels = len(self.strides)
        scores, boxes, landmarks = [], [], []
        for i, stride in enumerate(self.strides):
            points = cell_points(height_px, width_px, stride, self.slots)
            # Exports for one photo drop the batch dimension: (n, k) is read as (1, n, k).
            score = outputs[i].reshape(-1, len(points))
            sides = outputs[i + levels].reshape(-1, len(points), 4) * stride
            moves = outputs[i + 2 * levels].reshape(-1, len(points), 5, 2) * stride
            scores.append(score)
            boxes.append(np.concatenate([points - sides[..., :2], points + sides[..., 2:]], -1))
            landmarks.append(points[:, None] + moves)
        return Candidates(np.concatenate(scores, 1), np.concatenate(boxes, 1), np.concatenate(landmarks, 1))


class YuNetHead:
    """W. Wu et al., "YuNet", 2023. Twelve outputs: cls, obj, bbox, kps for strides 8, 16, 32; one slot a cell."""

    strides = (8, 16, 32)

    def __init__(self, output_names: Sequence[str]) -> None:
        try:
            self._rows = {
                k: [list(output_names).index(f"{k}_{s}") for s in self.strides] for k in ("cls", "obj", "bbox", "kps")
            }
        except ValueError as error:
            raise PackError("tasks.detection.file", f"lacks a YuNet output: {error}") from error

    def decode(self, outputs: Sequence[Float], height_px: int, width_px: int) -> Candidates:
        scores, boxes, landmarks = [], [], []
        for i, stride in enumerate(self.strides):
            points = cell_points(height_px, width_px, stride, 1)
            cls, obj, box, kps = (outputs[self._rows[k][i]] for k in ("cls", "obj", "bbox", "kps"))
            scores.append(np.sqrt(np.clip(cls[..., 0], 0, 1) * np.clip(obj[..., 0], 0, 1)))
            centre = points + box[..., :2] * stride
            half = np.exp(np.minimum(box[..., 2:], 10)) * stride / 2
            boxes.append(np.concatenate([centre - half, centre + half], -1))
            landmarks.append(points[:, None] + kps.reshape(*kps.shape[:2], 5, 2) * stride)
        return Candidates(np.concatenate(scores, 1), np.concatenate(boxes, 1), np.concatenate(landmarks, 1))


def make_head(kind: HeadKind, output_names: Sequence[str]) -> Head:
    return SCRFDHead(len(output_names)) if kind == "scrfd" else YuNetHead(output_names)


def suppress(boxes_xyxy: Float, scores: Float, iou: float = NMS_IOU) -> NDArray[np.intp]:
    """Greedy non-maximum suppression; returns the kept rows, best first. One (n, n) overlap matrix, no inner loop."""
    order = np.argsort(-scores, kind="stable")[:MAX_CANDIDATES]
    boxes = boxes_xyxy[order].astype(np.float64)
    area = np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(1)
    lower = np.maximum(boxes[:, None, :2], boxes[None, :, :2])
    upper = np.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = np.clip(upper - lower, 0, None).prod(2)
    overlaps = shared > iou * (area[:, None] + area[None] - shared)
    alive = np.ones(len(order), bool)
    for row in range(len(order)):
        if alive[row]:
            alive[row + 1 :] &= ~overlaps[row, row + 1 :]
    return np.asarray(order[alive], np.intp)


@dataclass(frozen=True)
class Canvas:
    """Where a photo lies on its canvas: its top left corner, scaled by ``scale`` (canvas pixels per photo pixel)."""

    height_px: int
    width_px: int
    scale: float


def choose_canvas(height_px: int, width_px: int, buckets: Sequence[int] = CANVAS_BUCKETS_PX) -> Canvas:
    """The smallest canvas of bucketed sides that holds the photo unscaled; photos beyond the largest are shrunk."""
    scale = min(1.0, buckets[-1] / max(height_px, width_px))
    return Canvas(bucket(round(height_px * scale), buckets), bucket(round(width_px * scale), buckets), scale)


class Detector:
    """A detector of a pack, ready to run.

    Args:
        network: opened from ``spec.path``.
        min_score: faces below are dropped, in (0, 1].
        buckets: sides of canvases in pixels, multiples of 32, ascending; one value forces a square canvas.
    """

    def __init__(
        self,
        network: Network,
        spec: DetectionSpec,
        min_score: float = DEFAULT_SCORE,
        buckets: Sequence[int] = CANVAS_BUCKETS_PX,
    ) -> None:
        self._network = network
        self._normalisation = spec.normalisation
        self._head = make_head(spec.head, network.output_names)
        self.min_score = min_score
        height = network.input_shape[2]
        self._buckets = (height,) if isinstance(height, int) else tuple(buckets)

    def detect(self, images: Sequence[NDArray[np.uint8]]) -> list[Faces]:
        """Find the faces of each (H, W, 3) uint8 RGB photo; photos on equal canvases share a batch."""
        canvases = [choose_canvas(image.shape[0], image.shape[1], self._buckets) for image in images]
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, canvas in enumerate(canvases):
            groups[canvas.height_px, canvas.width_px].append(i)
        results: dict[int, Faces] = {}
        for (height, width), members in groups.items():
            batch = np.stack([lay_out(images[i], canvases[i], self._normalisation) for i in members])
            candidates = self._head.decode(self._network.run(batch), height, width)
            for row, i in enumerate(members):
                results[i] = self._select(candidates, row, canvases[i], images[i].shape)
        return [results[i] for i in range(len(images))]

    def _select(self, candidates: Candidates, row: int, canvas: Canvas, shape: tuple[int, ...]) -> Faces:
        rows = np.flatnonzero(candidates.scores[row] >= self.min_score)
        boxes, scores = candidates.boxes[row, rows], candidates.scores[row, rows]
        kept = suppress(boxes, scores)
        limit = np.array([shape[1], shape[0]] * 2, np.float32)
        return Faces(
            np.clip(boxes[kept] / canvas.scale, 0, limit).astype(np.float32),
            (candidates.landmarks[row, rows[kept]] / canvas.scale).astype(np.float32),
            scores[kept].astype(np.float32),
        )


def lay_out(image: NDArray[np.uint8], canvas: Canvas, normalisation: Normalisation) -> Float:
    """Scale a photo onto its canvas and normalise it: (H, W, 3) uint8 RGB to (3, h, w) float32.

    The unused part is what the network takes for black.
    """
    if canvas.scale < 1.0:
        size = (max(1, round(image.shape[1] * canvas.scale)), max(1, round(image.shape[0] * canvas.scale)))
        # Bilinear sampling skips pixels beyond a halving, and small faces alias away.
        image = np.asarray(
            cv2.resize(image, size, interpolation=cv2.INTER_AREA if canvas.scale < 0.5 else cv2.INTER_LINEAR)
        )
    if normalisation.colour == "BGR":
        image = image[..., ::-1]
    out = np.full((3, canvas.height_px, canvas.width_px), (0 - normalisation.mean) / normalisation.std, np.float32)
    planes = image.transpose(2, 0, 1)
    target = out[:, : image.shape[0], : image.shape[1]]
    np.subtract(planes, np.float32(normalisation.mean), out=target)
    target *= np.float32(1 / normalisation.std)
    return out

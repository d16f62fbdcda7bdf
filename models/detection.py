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
from models.pixels import to_planes
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

    def largest(self) -> int:
        """Row of the face with the largest box.

        Raises:
            ValueError: there is no face.
        """
        return largest_box(self.boxes_xyxy)

    def nearest(self, x: float, y: float) -> int:
        """Row of the face whose box centre is nearest a point."""
        centres = (self.boxes_xyxy[:, :2] + self.boxes_xyxy[:, 2:]) / 2
        return int(((centres - (x, y)) ** 2).sum(1).argmin())


def areas(boxes_xyxy: NDArray[np.floating]) -> NDArray[np.floating]:
    """(n,) areas of (n, 4) boxes. One whose sides a network swapped holds nothing, be it one side or both."""
    return np.asarray(np.clip(boxes_xyxy[:, 2:] - boxes_xyxy[:, :2], 0, None).prod(1))


def largest_box(boxes_xyxy: NDArray[np.floating]) -> int:
    """Row of the largest of (n, 4) boxes, the first of several. Raises ValueError: there is none."""
    return int(areas(boxes_xyxy).argmax())


@dataclass(frozen=True)
class Canvas:
    """Where a photo lies on its canvas: its top left corner, scaled by ``scale`` (canvas pixels per photo pixel)."""

    height_px: int
    width_px: int
    scale: float


Answer = list[Float]
"""A network's outputs for one photo, (n, k) each: a row for every cell and slot."""


@dataclass(frozen=True, eq=False)
class Laid:
    """A photo that lies on its canvas, as the network takes it: ``planes`` (3, h, w); the photo's size in pixels."""

    planes: Float
    canvas: Canvas
    photo_height_px: int
    photo_width_px: int


@dataclass(frozen=True, eq=False)
class Candidates:
    """What one photo's cells predict: scores (n,), boxes (n, 4), landmarks (n, 5, 2), canvas pixels."""

    scores: Float
    boxes: Float
    landmarks: Float


class Head(Protocol):
    """Turns a network's raw outputs into candidates."""

    def decode(self, answer: Answer, width_px: int, min_score: float) -> Candidates:
        """Of the cells that score ``min_score`` or more, in their order; the others' boxes are never computed.

        Args:
            answer: the network's outputs for one canvas.
            width_px: of the canvas.
            min_score: in (0, 1].
        """


def cell_points(cells: NDArray[np.intp], width_px: int, stride: int) -> Float:
    """(n, 2) x, y of the corners of these cells, which are counted row by row."""
    return np.asarray(np.stack(np.divmod(cells, width_px // stride)[::-1], -1) * stride, np.float32)


def _joined(levels: Sequence[tuple[Float, Float, Float]]) -> Candidates:
    scores, boxes, landmarks = (np.concatenate(parts) for parts in zip(*levels, strict=True))
    return Candidates(scores, boxes, landmarks)


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

    def decode(self, answer: Answer, width_px: int, min_score: float) -> Candidates:
        """See Head."""
        levels = len(self.strides)
        found = []
        for i, stride in enumerate(self.strides):
            scores = answer[i][:, 0]
            rows = np.flatnonzero(scores >= min_score)
            points = cell_points(rows // self.slots, width_px, stride)
            sides = answer[i + levels][rows] * stride
            moves = answer[i + 2 * levels][rows].reshape(-1, 5, 2) * stride
            boxes = np.concatenate([points - sides[:, :2], points + sides[:, 2:]], -1)
            found.append((scores[rows], boxes, points[:, None] + moves))
        return _joined(found)


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

    def decode(self, answer: Answer, width_px: int, min_score: float) -> Candidates:
        """See Head."""
        found = []
        for i, stride in enumerate(self.strides):
            cls, obj, box, kps = (answer[self._rows[k][i]] for k in ("cls", "obj", "bbox", "kps"))
            scores = np.sqrt(np.clip(cls[:, 0], 0, 1) * np.clip(obj[:, 0], 0, 1))
            rows = np.flatnonzero(scores >= min_score)
            points = cell_points(rows, width_px, stride)
            centre = points + box[rows, :2] * stride
            half = np.exp(np.minimum(box[rows, 2:], 10)) * stride / 2
            boxes = np.concatenate([centre - half, centre + half], -1)
            found.append((scores[rows], boxes, points[:, None] + kps[rows].reshape(-1, 5, 2) * stride))
        return _joined(found)


def make_head(kind: HeadKind, output_names: Sequence[str]) -> Head:
    return SCRFDHead(len(output_names)) if kind == "scrfd" else YuNetHead(output_names)


def suppress(boxes_xyxy: Float, scores: Float, iou: float = NMS_IOU) -> NDArray[np.intp]:
    """Greedy non-maximum suppression; returns the kept rows, best first. One (n, n) overlap matrix, no inner loop."""
    order = np.argsort(-scores, kind="stable")[:MAX_CANDIDATES]
    boxes = boxes_xyxy[order].astype(np.float64)
    area = areas(boxes)
    lower = np.maximum(boxes[:, None, :2], boxes[None, :, :2])
    upper = np.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = np.clip(upper - lower, 0, None).prod(2)
    overlaps = shared > iou * (area[:, None] + area[None] - shared)
    alive = np.ones(len(order), bool)
    for row in range(len(order)):
        if alive[row]:
            alive[row + 1 :] &= ~overlaps[row, row + 1 :]
    return np.asarray(order[alive], np.intp)


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
        laid = [self.lay_out(image) for image in images]
        return [self.select(one, answer) for one, answer in zip(laid, self.run(laid), strict=True)]

    def lay_out(self, image: NDArray[np.uint8]) -> Laid:
        """Bring a (H, W, 3) uint8 RGB photo onto its canvas."""
        height, width = image.shape[:2]
        canvas = self.canvas(height, width)
        return self.place(shrink(image, canvas.scale), canvas, height, width)

    def canvas(self, height_px: int, width_px: int) -> Canvas:
        """The canvas for a photo of this size."""
        return choose_canvas(height_px, width_px, self._buckets)

    def place(self, image: NDArray[np.uint8], canvas: Canvas, photo_height_px: int, photo_width_px: int) -> Laid:
        """Lay a photo of this size, which is shrunk already to (h, w, 3) uint8 RGB, onto its canvas."""
        return Laid(lay_out(image, canvas, self._normalisation), canvas, photo_height_px, photo_width_px)

    def run(self, laid: Sequence[Laid]) -> list[Answer]:
        """Only this needs the network: its answer to each photo, in order. Those on equal canvases share a batch."""
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, one in enumerate(laid):
            groups[one.planes.shape].append(i)
        answers: dict[int, Answer] = {}
        for members in groups.values():
            outputs = self._network.run(np.stack([laid[i].planes for i in members]))
            # Exports for one photo drop the batch dimension: theirs lie one after the other.
            each = [output.reshape(len(members), -1, output.shape[-1]) for output in outputs]
            for row, i in enumerate(members):
                answers[i] = [output[row] for output in each]
        return [answers[i] for i in range(len(laid))]

    def select(self, laid: Laid, answer: Answer) -> Faces:
        """Read the network's answer to a photo."""
        canvas = laid.canvas
        found = self._head.decode(answer, canvas.width_px, self.min_score)
        kept = suppress(found.boxes, found.scores)
        limit = np.array([laid.photo_width_px, laid.photo_height_px] * 2, np.float32)
        return Faces(
            np.clip(found.boxes[kept] / canvas.scale, 0, limit).astype(np.float32),
            (found.landmarks[kept] / canvas.scale).astype(np.float32),
            found.scores[kept].astype(np.float32),
        )


def shrink(image: NDArray[np.uint8], scale: float) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 to ``scale`` of its size, in (0, 1]."""
    # Bilinear sampling skips pixels beyond a halving, and small faces alias away. Halving by means is many times as
    # fast as taking means over any other part.
    while scale < 0.5 and min(image.shape[:2]) > 1:
        height, width = image.shape[0] // 2, image.shape[1] // 2
        even = image[: 2 * height, : 2 * width]
        image = np.asarray(cv2.resize(even, (width, height), interpolation=cv2.INTER_AREA), np.uint8)
        scale *= 2
    if scale == 1.0:
        return image
    size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_LINEAR), np.uint8)


def lay_out(image: NDArray[np.uint8], canvas: Canvas, normalisation: Normalisation) -> Float:
    """Normalise a photo that has its canvas's scale: (H, W, 3) uint8 RGB to (3, h, w) float32.

    What lies beyond the canvas is cut off; the unused part is what the network takes for black.
    """
    black = (0 - normalisation.mean) / normalisation.std
    out = np.full((1, 3, canvas.height_px, canvas.width_px), black, np.float32)
    to_planes([image[: canvas.height_px, : canvas.width_px]], normalisation, out)
    return np.asarray(out[0], np.float32)

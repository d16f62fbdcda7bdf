"""Face detection with SCRFD and YuNet: boxes, five landmarks and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from models.errors import PackError
from models.runtime.network import Float, Network
from models.runtime.onnx_runtime import choose_bucket
from models.vision.alignment import rotate_points
from models.vision.pixels import to_planes
from models.vision.specs import DetectionSpec, Normalization

CANVAS_BUCKETS_PX: Final = (256, 384, 512, 640)
DEFAULT_MIN_SCORE: Final = 0.5
NMS_IOU: Final = 0.4
MAX_CANDIDATES: Final = 2000
"""Candidates per photo, best first, since hostile photos could make the quadratic suppression slow."""


@dataclass(frozen=True, eq=False)
class Detections:
    """Faces of one photo in photo pixels, best score first.

    Args:
        boxes_xyxy: (n, 4) x0, y0, x1, y1.
        landmarks_xy: (n, 5, 2) left eye, right eye, nose, left and right mouth corner as seen in the upright face.
        scores: (n,) in 0..1.
    """

    boxes_xyxy: Float
    landmarks_xy: Float
    scores: Float

    @classmethod
    def join(cls, parts: Sequence[Detections]) -> Detections:
        """Return the faces of all parts, in their order."""
        columns = ((each.boxes_xyxy, each.landmarks_xy, each.scores) for each in parts)
        return cls(*(np.concatenate(column) for column in zip(*columns, strict=True)))

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: NDArray[np.intp] | slice) -> Detections:
        return Detections(self.boxes_xyxy[rows], self.landmarks_xy[rows], self.scores[rows])

    def largest(self) -> int:
        """Return the row of the face with the largest box. Raises ValueError if there is no face."""
        return largest_box(self.boxes_xyxy)

    def largest_of(self, count: int) -> Detections:
        """Return the ``count`` faces with the largest boxes, best score first."""
        return self[np.sort(np.argsort(-box_areas(self.boxes_xyxy), kind="stable")[:count])]

    def nearest(self, x: float, y: float) -> int:
        """Return the row of the face whose box center is nearest to a point."""
        centers = (self.boxes_xyxy[:, :2] + self.boxes_xyxy[:, 2:]) / 2
        return int(((centers - (x, y)) ** 2).sum(1).argmin())


def box_areas(boxes_xyxy: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the (n,) areas of (n, 4) boxes; boxes with swapped sides have area 0."""
    return np.asarray(np.clip(boxes_xyxy[:, 2:] - boxes_xyxy[:, :2], 0, None).prod(1))


def largest_box(boxes_xyxy: NDArray[np.floating]) -> int:
    """Return the row of the first largest of (n, 4) boxes. Raises ValueError if there is no box."""
    return int(box_areas(boxes_xyxy).argmax())


@dataclass(frozen=True)
class Canvas:
    """Network input of one size with the photo at its top left; ``scale`` is canvas pixels per photo pixel."""

    height_px: int
    width_px: int
    scale: float


RawOutputs = list[Float]
"""Network outputs for one photo, (n, k) each, with one row per anchor."""


@dataclass(frozen=True, eq=False)
class PreparedPhoto:
    """Photo on its canvas as network input ``planes`` (3, h, w), with its original size.

    ``turns`` counterclockwise quarter turns of the photo gave this orientation, which canvas and size describe.
    """

    planes: Float
    canvas: Canvas
    photo_height_px: int
    photo_width_px: int
    turns: int = 0


@dataclass(frozen=True, eq=False)
class Candidates:
    """Decoded scores (n,), boxes (n, 4) and landmarks (n, 5, 2) of one photo, in canvas pixels."""

    scores: Float
    boxes: Float
    landmarks: Float


SCRFD_STRIDES: Final[Mapping[int, tuple[int, ...]]] = {9: (8, 16, 32), 15: (8, 16, 32, 64, 128)}
"""Strides of SCRFD with five points, by the number of outputs. Without points it has 6 or 10."""
SCRFD_COLUMNS: Final = (1, 4, 10)
"""Numbers per anchor: score, box, points."""


class Head(ABC):
    """Decoder of network outputs, with one level of outputs for each stride.

    ``anchors`` per grid cell. ``upright_score`` is the score of a photo's best face from which the photo counts as
    upright. In LFW, 1 % of the upright photos and most rotated ones stay below it.
    """

    upright_score: ClassVar[float]
    strides: tuple[int, ...] = (8, 16, 32)
    anchors = 1

    @abstractmethod
    def output_shapes(self, height_px: int, width_px: int) -> list[tuple[int, int]]:
        """Return the (rows, columns) of each output for one canvas."""

    @abstractmethod
    def _scores(self, outputs: RawOutputs, level: int) -> Float:
        """Return the (n,) scores of a level, in 0..1."""

    @abstractmethod
    def _faces(self, outputs: RawOutputs, level: int, rows: NDArray[np.intp], points: Float) -> tuple[Float, Float]:
        """Return boxes (n, 4) and landmarks (n, 5, 2) of some rows, whose cells begin at ``points``."""

    def _rows_of_levels(self, height_px: int, width_px: int) -> list[int]:
        return [self.anchors * (height_px // stride) * (width_px // stride) for stride in self.strides]

    def best_score(self, outputs: RawOutputs) -> float:
        """Return the best score of all anchors, in 0..1."""
        return max(float(self._scores(outputs, level).max()) for level in range(len(self.strides)))

    def decode(self, outputs: RawOutputs, width_px: int, min_score: float) -> Candidates:
        """Decode the anchors with a score of at least ``min_score`` in (0, 1].

        Args:
            outputs: network outputs for one canvas.
            width_px: width of the canvas.
        """
        levels = []
        for level, stride in enumerate(self.strides):
            scores = self._scores(outputs, level)
            rows = np.flatnonzero(scores >= min_score)
            # The top left corners of the grid cells, which are numbered row by row.
            cells = np.divmod(rows // self.anchors, width_px // stride)
            points = np.asarray(np.stack(cells[::-1], -1) * stride, np.float32)
            levels.append((scores[rows], *self._faces(outputs, level, rows, points)))
        return Candidates(*(np.concatenate(parts) for parts in zip(*levels, strict=True)))


class SCRFDHead(Head):
    """SCRFD (J. Guo et al., 2021).

    Nine outputs with strides 8 to 32 and two anchors per cell, or fifteen with strides 8 to 128 and one anchor. The
    outputs are all scores, then all box distances, then all landmark offsets, in units of the stride.
    """

    upright_score = 0.72

    def __init__(self, output_count: int) -> None:
        if output_count not in SCRFD_STRIDES:
            raise PackError("tasks.detection.file", f"has {output_count} outputs; SCRFD with landmarks has 9 or 15")
        self.strides = SCRFD_STRIDES[output_count]
        self.anchors = 2 if len(self.strides) == 3 else 1

    def output_shapes(self, height_px: int, width_px: int) -> list[tuple[int, int]]:
        return [(count, columns) for columns in SCRFD_COLUMNS for count in self._rows_of_levels(height_px, width_px)]

    def _scores(self, outputs: RawOutputs, level: int) -> Float:
        return outputs[level][:, 0]

    def _faces(self, outputs: RawOutputs, level: int, rows: NDArray[np.intp], points: Float) -> tuple[Float, Float]:
        levels, stride = len(self.strides), self.strides[level]
        distances = outputs[level + levels][rows] * stride
        offsets = outputs[level + 2 * levels][rows].reshape(-1, 5, 2) * stride
        return np.concatenate([points - distances[:, :2], points + distances[:, 2:]], -1), points[:, None] + offsets


class YuNetHead(Head):
    """YuNet (W. Wu et al., 2023). Twelve outputs: cls, obj, bbox, kps for strides 8, 16, 32; one anchor per cell."""

    upright_score = 0.9

    def __init__(self, output_names: Sequence[str]) -> None:
        try:
            self._rows = {
                k: [list(output_names).index(f"{k}_{s}") for s in self.strides] for k in ("cls", "obj", "bbox", "kps")
            }
        except ValueError as error:
            raise PackError("tasks.detection.file", f"lacks a YuNet output: {error}") from error

    def output_shapes(self, height_px: int, width_px: int) -> list[tuple[int, int]]:
        counts = self._rows_of_levels(height_px, width_px)
        shapes = {
            index: (count, columns)
            for kind, columns in (("cls", 1), ("obj", 1), ("bbox", 4), ("kps", 10))
            for count, index in zip(counts, self._rows[kind], strict=True)
        }
        return [shapes[index] for index in sorted(shapes)]

    def _scores(self, outputs: RawOutputs, level: int) -> Float:
        cls, obj = (outputs[self._rows[k][level]][:, 0] for k in ("cls", "obj"))
        return np.sqrt(np.clip(cls, 0, 1) * np.clip(obj, 0, 1))

    def _faces(self, outputs: RawOutputs, level: int, rows: NDArray[np.intp], points: Float) -> tuple[Float, Float]:
        stride = self.strides[level]
        box, kps = (outputs[self._rows[k][level]][rows] for k in ("bbox", "kps"))
        center = points + box[:, :2] * stride
        half = np.exp(np.minimum(box[:, 2:], 10)) * stride / 2
        return np.concatenate([center - half, center + half], -1), points[:, None] + kps.reshape(-1, 5, 2) * stride


def overlaps(a_xyxy: NDArray[np.floating], b_xyxy: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return (n, m): which of (n, 4) boxes share more than NMS_IOU of their union with which of (m, 4)."""
    a, b = a_xyxy.astype(np.float64), b_xyxy.astype(np.float64)
    lower = np.maximum(a[:, None, :2], b[None, :, :2])
    upper = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.clip(upper - lower, 0, None).prod(2)
    return np.asarray(shared > NMS_IOU * (box_areas(a)[:, None] + box_areas(b)[None] - shared))


def suppress_overlaps(boxes_xyxy: Float, scores: Float) -> NDArray[np.intp]:
    """Return the rows that greedy non-maximum suppression keeps, best first."""
    order = np.argsort(-scores, kind="stable")[:MAX_CANDIDATES]
    overlapping = overlaps(boxes_xyxy[order], boxes_xyxy[order])
    alive = np.ones(len(order), bool)
    for row in range(len(order)):
        if alive[row]:
            alive[row + 1 :] &= ~overlapping[row, row + 1 :]
    return np.asarray(order[alive], np.intp)


def choose_canvas(height_px: int, width_px: int, buckets: Sequence[int] = CANVAS_BUCKETS_PX) -> Canvas:
    """Return the smallest canvas that holds the photo; photos larger than every canvas are scaled down."""
    scale = min(1.0, buckets[-1] / max(height_px, width_px))
    return Canvas(
        choose_bucket(round(height_px * scale), buckets), choose_bucket(round(width_px * scale), buckets), scale
    )


class Detector:
    """Detection network of a pack.

    Args:
        network: open network of ``spec``.
        min_score: smallest score of a face, in (0, 1].
        buckets: ascending canvas sides in pixels, multiples of 32. A network with a fixed input size ignores them.

    Raises:
        PackError: the outputs do not fit the head, or the network takes only photos of one oblong size.
    """

    def __init__(
        self,
        network: Network,
        spec: DetectionSpec,
        min_score: float = DEFAULT_MIN_SCORE,
        buckets: Sequence[int] = CANVAS_BUCKETS_PX,
    ) -> None:
        self._network = network
        self._normalization = spec.normalization
        names = network.output_names
        self._head: Head = SCRFDHead(len(names)) if spec.head == "scrfd" else YuNetHead(names)
        self.min_score = min_score
        height, width = (side if isinstance(side, int) else None for side in network.input_shape[2:])
        if height != width:
            raise PackError(
                "tasks.detection.file",
                f"{network.path.name} takes only photos of {height or '?'}x{width or '?'}: export it with an open or "
                "equal height and width",
            )
        self._buckets = tuple(buckets) if height is None else (height,)

    def detect(self, images: Sequence[NDArray[np.uint8]]) -> list[Detections]:
        """Return the faces of each (H, W, 3) uint8 RGB photo in its given orientation."""
        photos = [self.prepare(image) for image in images]
        return [self.decode_faces(photo, outputs) for photo, outputs in zip(photos, self.run(photos), strict=True)]

    def prepare(self, image: NDArray[np.uint8]) -> PreparedPhoto:
        """Scale a (H, W, 3) uint8 RGB photo and place it on its canvas."""
        height, width = image.shape[:2]
        canvas = self.canvas(height, width)
        return self.place_on_canvas(downscale(image, canvas.scale), canvas, height, width)

    @property
    def largest_side_px(self) -> int:
        """Side of the largest canvas."""
        return self._buckets[-1]

    def output_shapes(self, canvas: Canvas) -> list[tuple[int, int]]:
        """Return the (rows, columns) of each network output for a photo on the canvas."""
        return self._head.output_shapes(canvas.height_px, canvas.width_px)

    def canvas(self, height_px: int, width_px: int) -> Canvas:
        """Return the canvas of a photo of this size."""
        return choose_canvas(height_px, width_px, self._buckets)

    def place_on_canvas(
        self, image: NDArray[np.uint8], canvas: Canvas, photo_height_px: int, photo_width_px: int
    ) -> PreparedPhoto:
        """Place a (h, w, 3) uint8 RGB photo that is already scaled on its canvas."""
        return PreparedPhoto(fill_canvas(image, canvas, self._normalization), canvas, photo_height_px, photo_width_px)

    def run(self, photos: Sequence[PreparedPhoto]) -> list[RawOutputs]:
        """Run the network and return its outputs for each photo. Photos on equal canvases share a batch."""
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, photo in enumerate(photos):
            groups[photo.planes.shape].append(i)
        by_photo: dict[int, RawOutputs] = {}
        for members in groups.values():
            outputs = self._network.run(np.stack([photos[i].planes for i in members]))
            # Exports without a batch axis return the rows of all photos one after the other.
            each = [output.reshape(len(members), -1, output.shape[-1]) for output in outputs]
            for row, i in enumerate(members):
                by_photo[i] = [output[row] for output in each]
        return [by_photo[i] for i in range(len(photos))]

    def best_score(self, outputs: RawOutputs) -> float:
        """Return the best score of all anchors, in 0..1."""
        return self._head.best_score(outputs)

    @property
    def confident_score(self) -> float:
        """Score of an upright face. From it, no other orientation or size has to be tried."""
        return max(self._head.upright_score, self.min_score)

    def rotated(self, photo: PreparedPhoto, turns: int) -> PreparedPhoto:
        """Return the upright photo after counterclockwise quarter ``turns``, 1 to 3."""
        # Rows and columns outside the scaled photo would come first after a rotation.
        turned = np.rot90(_scaled_photo(photo), turns, (1, 2))
        canvas = replace(self.canvas(*turned.shape[1:]), scale=photo.canvas.scale)
        planes = black_canvas(canvas, self._normalization)
        planes[:, : turned.shape[1], : turned.shape[2]] = turned
        size = (photo.photo_height_px, photo.photo_width_px)
        return PreparedPhoto(planes, canvas, *(size if turns == 2 else size[::-1]), turns)

    def half_size(self, photo: PreparedPhoto) -> PreparedPhoto:
        """Return the photo at half its size, where a face that fills it is no larger than faces of the training."""
        part = _scaled_photo(photo)
        height, width = (max(1, side // 2) for side in part.shape[1:])
        canvas = replace(self.canvas(height, width), scale=photo.canvas.scale / 2)
        planes = black_canvas(canvas, self._normalization)
        for plane, small in zip(part, planes, strict=True):
            small[:height, :width] = cv2.resize(plane, (width, height), interpolation=cv2.INTER_AREA)
        return replace(photo, planes=planes, canvas=canvas)

    def decode_faces(self, photo: PreparedPhoto, outputs: RawOutputs) -> Detections:
        """Return the faces in the network's outputs for a photo, in pixels of the photo before its rotation."""
        canvas, width, height = photo.canvas, photo.photo_width_px, photo.photo_height_px
        found = self._head.decode(outputs, canvas.width_px, self.min_score)
        kept = suppress_overlaps(found.boxes, found.scores)
        limit = np.array([width, height] * 2, np.float32)
        boxes = np.clip(found.boxes[kept] / canvas.scale, 0, limit)
        landmarks = found.landmarks[kept] / canvas.scale
        if photo.turns:
            corners = rotate_points(boxes.reshape(-1, 2, 2), -photo.turns, width, height)
            boxes = np.clip(np.concatenate([corners.min(1), corners.max(1)], -1), 0, None)
            landmarks = rotate_points(landmarks, -photo.turns, width, height)
        return Detections(boxes.astype(np.float32), landmarks.astype(np.float32), found.scores[kept].astype(np.float32))


def _scaled_photo(photo: PreparedPhoto) -> Float:
    """Return the part of the planes that the photo covers."""
    sides = (photo.photo_height_px, photo.photo_width_px)
    rows, columns = (max(1, round(side * photo.canvas.scale)) for side in sides)
    return photo.planes[:, :rows, :columns]


def downscale(image: NDArray[np.uint8], scale: float) -> NDArray[np.uint8]:
    """Scale a (H, W, 3) uint8 image by ``scale`` in (0, 1]."""
    # Bilinear sampling below half size skips pixels, and small faces vanish by aliasing. Area averaging is fast only
    # for factors of two.
    while scale < 0.5 and min(image.shape[:2]) > 1:
        height, width = image.shape[0] // 2, image.shape[1] // 2
        even = image[: 2 * height, : 2 * width]
        image = np.asarray(cv2.resize(even, (width, height), interpolation=cv2.INTER_AREA), np.uint8)
        scale *= 2
    if scale == 1.0:
        return image
    size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_LINEAR), np.uint8)


def fill_canvas(image: NDArray[np.uint8], canvas: Canvas, normalization: Normalization) -> Float:
    """Normalize a scaled (H, W, 3) uint8 RGB photo into a (3, h, w) float32 canvas.

    The photo is cropped to the canvas; the rest of the canvas is black.
    """
    planes = black_canvas(canvas, normalization)
    to_planes([image[: canvas.height_px, : canvas.width_px]], normalization, planes[None])
    return planes


def black_canvas(canvas: Canvas, normalization: Normalization) -> Float:
    """Return a (3, h, w) float32 canvas of normalized black."""
    black = (0 - normalization.mean) / normalization.std
    return np.full((3, canvas.height_px, canvas.width_px), black, np.float32)

"""Pages composed of portraits on a background: many faces in one crop, with sizes and places known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from training.detection.photos import AnnotatedPhoto
from training.detection.targets import FaceTargets

MAX_FACES: Final = 16
SHEET_SHARE: Final = 0.3
"""Share of the pages whose portraits lie on a grid, as on a contact sheet."""
OVAL_SHARE: Final = 0.5
"""Share of the pages whose portraits are ovals with soft edges; the others keep their rectangles."""
MAX_COVERED: Final = 0.15
"""Share of a face that a later portrait may cover."""
MIN_LEARNED_FACE_PX: Final = 8.0
"""Smaller faces count neither as face nor as background."""
MIRRORED_LANDMARKS: Final = [1, 0, 2, 4, 3]
PLACES_TRIED: Final = 6
MAX_OVAL_DISTANCE: Final = 0.7
"""Distance of a face's center from the middle of an oval piece, in half axes, beyond which the face is ignored."""


def background_crop(backgrounds: Sequence[AnnotatedPhoto], size_px: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Cut a random (size_px, size_px, 3) square of a random background, scaled at random, mirrored at its edges."""
    image = backgrounds[int(rng.integers(len(backgrounds)))].image
    height, width = image.shape[:2]
    smallest = size_px / max(height, width)
    scale = math.exp(rng.uniform(math.log(smallest), math.log(max(1.5, 1.2 * smallest))))
    interpolation = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    scaled = cv2.resize(
        image, (max(8, round(width * scale)), max(8, round(height * scale))), interpolation=interpolation
    )
    missing = [max(0, size_px - side) for side in scaled.shape[:2]]
    scaled = cv2.copyMakeBorder(
        scaled, missing[0] // 2, -(-missing[0] // 2), missing[1] // 2, -(-missing[1] // 2), cv2.BORDER_REFLECT_101
    )
    y, x = (int(rng.integers(side - size_px + 1)) for side in scaled.shape[:2])
    crop = scaled[y : y + size_px, x : x + size_px]
    return np.ascontiguousarray(crop[:, ::-1] if rng.random() < 0.5 else crop, dtype=np.uint8)


def compose_page(
    portraits: Sequence[AnnotatedPhoto], paper: NDArray[np.uint8], face_px: float, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], FaceTargets]:
    """Paste portraits on a square background.

    Args:
        paper: (s, s, 3) uint8 RGB background without faces. It is overwritten.
        face_px: middle size of the faces, in pixels of the page.

    Returns:
        The page and its faces.
    """
    size_px = len(paper)
    sheet, oval = rng.random() < SHEET_SHARE, rng.random() < OVAL_SHARE
    pitch = face_px * rng.uniform(1.5, 2.2)
    room = max(1, int(size_px / pitch) ** 2)
    places = _sheet(size_px, pitch, rng) if sheet else [None] * int(rng.integers(1, min(MAX_FACES, room) + 1))
    pasted: list[FaceTargets] = []
    for place in places:
        photo = portraits[int(rng.integers(len(portraits)))]
        px = face_px if sheet else face_px * 2 ** rng.uniform(-0.5, 0.5)
        patch, faces = cut_portrait(photo, px, rng.uniform(1.15, 2.2), pitch if sheet else math.inf, rng)
        corner = _free_place(patch.shape[:2], size_px, pasted, rng) if place is None else place
        if corner is None:
            continue
        visible = _paste(paper, patch, corner, oval and not sheet)
        if oval and not sheet:
            faces = _ignore_outside_oval(faces, patch.shape[:2])
        offset = torch.tensor([corner[0], corner[1]], dtype=torch.float32)
        pasted.append(_inside(faces, offset, visible))
    return paper, FaceTargets(
        *(torch.cat([getattr(f, name) for f in pasted]) for name in ("boxes", "points", "has_points", "ignore"))
    )


def _sheet(size_px: int, pitch: float, rng: np.random.Generator) -> list[tuple[int, int] | None]:
    first = rng.uniform(-pitch / 2, pitch / 2, 2)
    steps = np.arange(0, min(size_px, 8 * pitch), pitch)
    return [(round(first[0] + x), round(first[1] + y)) for y in steps for x in steps]


def cut_portrait(
    photo: AnnotatedPhoto, face_px: float, margin: float, largest_px: float, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], FaceTargets]:
    """Cut the largest face of a photo with ``margin`` times its size around it, scaled to ``face_px``.

    Args:
        largest_px: maximum side of the piece, in pixels.

    Returns:
        The piece, mirrored at random, and its faces in the piece's pixels.
    """
    sides = np.where(photo.doubtful, 0.0, np.sqrt((photo.boxes[:, 2:] - photo.boxes[:, :2]).prod(1)))
    row = int(sides.argmax())
    scale = face_px / float(sides[row])
    half = min(margin * float(sides[row]), largest_px / scale) / 2
    center = (photo.boxes[row, :2] + photo.boxes[row, 2:]) / 2 + rng.uniform(-0.1, 0.1, 2) * sides[row]
    height, width = photo.image.shape[:2]
    x0, y0 = np.maximum(np.floor(center - half), 0).astype(int)
    x1, y1 = np.minimum(np.ceil(center + half), (width, height)).astype(int)
    piece = photo.image[y0:y1, x0:x1]
    target = (max(4, round((x1 - x0) * scale)), max(4, round((y1 - y0) * scale)))
    interpolation = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    patch = np.asarray(cv2.resize(piece, target, interpolation=interpolation), np.uint8)
    scales = np.array([target[0] / (x1 - x0), target[1] / (y1 - y0)])
    boxes = ((photo.boxes.reshape(-1, 2, 2) - (x0, y0)) * scales).reshape(-1, 4)
    points = (photo.points - (x0, y0)) * scales
    if rng.random() < 0.5:
        patch = patch[:, ::-1]
        boxes = np.stack([target[0] - boxes[:, 2], boxes[:, 1], target[0] - boxes[:, 0], boxes[:, 3]], 1)
        points = np.stack([target[0] - 1 - points[..., 0], points[..., 1]], -1)[:, MIRRORED_LANDMARKS]
    known = np.isfinite(points).all((1, 2))
    return patch, FaceTargets(
        torch.from_numpy(boxes.astype(np.float32)),
        torch.from_numpy(np.nan_to_num(points).astype(np.float32)),
        torch.from_numpy(known),
        torch.from_numpy(photo.doubtful.copy()),
    )


def _free_place(
    shape: tuple[int, ...], size_px: int, pasted: Sequence[FaceTargets], rng: np.random.Generator
) -> tuple[int, int] | None:
    """Return the corner of a place where a piece covers little of the faces so far, or None."""
    height, width = shape[:2]
    taken = torch.cat([f.boxes for f in pasted]).numpy() if pasted else np.zeros((0, 4), np.float32)
    for _ in range(PLACES_TRIED):
        x, y = (round(rng.uniform(-0.25 * side, size_px - 0.75 * side)) for side in (width, height))
        lower, upper = np.maximum(taken[:, :2], (x, y)), np.minimum(taken[:, 2:], (x + width, y + height))
        covered = np.clip(upper - lower, 0, None).prod(1) / np.maximum((taken[:, 2:] - taken[:, :2]).prod(1), 1e-6)
        if covered.max(initial=0) <= MAX_COVERED:
            return x, y
    return None


def _paste(
    paper: NDArray[np.uint8], patch: NDArray[np.uint8], corner: tuple[int, int], oval: bool
) -> tuple[int, int, int, int]:
    """Paste a piece, cut at the page's edges; return x0, y0, x1, y1 of what is visible."""
    size = len(paper)
    height, width = patch.shape[:2]
    (x, y) = corner
    x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + width, size), min(y + height, size)
    if x1 <= x0 or y1 <= y0:
        return x0, y0, x0, y0
    part = patch[y0 - y : y1 - y, x0 - x : x1 - x]
    if not oval:
        paper[y0:y1, x0:x1] = part
        return x0, y0, x1, y1
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    distance = np.hypot((columns + 0.5) / width * 2 - 1, (rows + 0.5) / height * 2 - 1)
    opacity = np.clip((1.05 - distance) / 0.15, 0, 1)[y0 - y : y1 - y, x0 - x : x1 - x, None]
    below = paper[y0:y1, x0:x1]
    paper[y0:y1, x0:x1] = (part * opacity + below * (1 - opacity)).astype(np.uint8)
    return x0, y0, x1, y1


def _ignore_outside_oval(faces: FaceTargets, shape: tuple[int, ...]) -> FaceTargets:
    """Ignore faces whose center lies where an oval piece is mostly transparent."""
    half = torch.tensor([shape[1] / 2, shape[0] / 2])
    distance = ((faces.boxes[:, :2] + faces.boxes[:, 2:]) / 2 / half - 1).norm(dim=1)
    return FaceTargets(faces.boxes, faces.points, faces.has_points, faces.ignore | (distance > MAX_OVAL_DISTANCE))


def _inside(faces: FaceTargets, offset: torch.Tensor, visible: tuple[int, int, int, int]) -> FaceTargets:
    """Move faces to their place on the page; drop what is not visible, ignore what is hardly visible or small."""
    boxes = faces.boxes + offset.repeat(2)
    x0, y0, x1, y1 = visible
    lower = torch.maximum(boxes[:, :2], torch.tensor([x0, y0], dtype=torch.float32))
    upper = torch.minimum(boxes[:, 2:], torch.tensor([x1, y1], dtype=torch.float32))
    sides = boxes[:, 2:] - boxes[:, :2]
    share = (upper - lower).clamp(min=0).prod(1) / sides.prod(1).clamp(min=1e-6)
    ignore = faces.ignore | (share < 0.4) | (sides.amin(1) < MIN_LEARNED_FACE_PX)
    seen = share > 0
    return FaceTargets(boxes[seen], (faces.points + offset)[seen], faces.has_points[seen], ignore[seen])

"""Training crops of annotated photos, with face sizes uniform on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from training.detection.pages import MIN_LEARNED_FACE_PX, MIRRORED_LANDMARKS, background_crop, compose_page
from training.detection.photos import AnnotatedPhoto, TrainingPhotos
from training.detection.targets import FaceTargets

KIND_WEIGHTS: Final = {"scene": 0.55, "portrait": 0.12, "page": 0.25, "background": 0.08}
"""Shares of the kinds of crops, where the photos allow all of them."""
MAX_PAGE_FACE_SHARE: Final = 0.6
"""Size of the largest faces of a composed page, as a share of its side."""
NO_FACE_SHARE = 0.08
TEXTURE_SHARE = 0.06
"""Share of crops replaced by face-free textures with the colors of a photo."""
JPEG_SHARE = 0.3
TILE_SIZES_PX = (12, 24)
MIN_COVERED_SHARE = 0.6
"""Share of the crop below which four photos form a mosaic instead of one photo with black borders."""
MIN_FACE_TILES = 2.5
"""Minimum face size, in tiles, for shuffling a photo: no tile may contain a face."""

NO_FACES = FaceTargets(
    torch.zeros(0, 4), torch.zeros(0, 5, 2), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)
)


def training_crop(
    photos: TrainingPhotos, size_px: int, face_sizes_px: tuple[float, float], rng: np.random.Generator
) -> tuple[NDArray[np.uint8], FaceTargets]:
    """Cut one augmented (size_px, size_px, 3) crop with its faces: scaled, shifted, flipped, recolored.

    One random face gets a size drawn log-uniformly from ``face_sizes_px``. If its photo would cover little of the crop,
    four photos share it. Some crops are pages composed of portraits on a background, some only backgrounds.
    """
    low, high = face_sizes_px
    face_px = math.exp(rng.uniform(math.log(low), math.log(min(high, size_px * 0.9))))
    kind = _choose_kind(photos, rng)
    if kind == "background":
        return _recolor(background_crop(photos.backgrounds, size_px, rng), rng), NO_FACES
    if kind == "page":
        paper = background_crop(photos.backgrounds, size_px, rng)
        image, faces = compose_page(photos.portraits, paper, min(face_px, MAX_PAGE_FACE_SHARE * size_px), rng)
        return _recolor(image, rng), faces
    chosen = photos.scenes if kind == "scene" else photos.portraits
    image, faces, covered = _cut_square(_random_photo(chosen, rng), size_px, face_px, rng)
    if covered < MIN_COVERED_SHARE:
        half = size_px // 2
        quarters = [_cut_square(_random_photo(chosen, rng), half, min(face_px, half * 0.7), rng)[:2] for _ in range(4)]
        image, faces = _mosaic(quarters)
    if rng.random() < TEXTURE_SHARE:
        smallest_px = float((faces.boxes[:, 2:] - faces.boxes[:, :2]).numpy().min(initial=np.inf))
        return _recolor(texture(image, smallest_px, rng), rng), NO_FACES
    return _recolor(image, rng), faces


def _choose_kind(photos: TrainingPhotos, rng: np.random.Generator) -> str:
    """Choose a kind of crop by KIND_WEIGHTS, among those that the photos allow."""
    possible = {
        "scene": len(photos.scenes) > 0,
        "portrait": len(photos.portraits) > 0,
        "page": len(photos.portraits) > 0 and len(photos.backgrounds) > 0,
        "background": len(photos.backgrounds) > 0,
    }
    weights = np.array([KIND_WEIGHTS[kind] * possible[kind] for kind in KIND_WEIGHTS])
    return list(KIND_WEIGHTS)[int(rng.choice(len(weights), p=weights / weights.sum()))]


def _random_photo(photos: Sequence[AnnotatedPhoto], rng: np.random.Generator) -> AnnotatedPhoto:
    return photos[int(rng.integers(len(photos)))]


def _mosaic(quarters: Sequence[tuple[NDArray[np.uint8], FaceTargets]]) -> tuple[NDArray[np.uint8], FaceTargets]:
    """Join four square pieces, with boxes clipped to their piece."""
    half = len(quarters[0][0])
    (a, _), (b, _), (c, _), (d, _) = quarters
    shifts = [torch.tensor([x, y], dtype=torch.float32) for y in (0, half) for x in (0, half)]
    parts = [faces for _, faces in quarters]
    return np.vstack([np.hstack([a, b]), np.hstack([c, d])]), FaceTargets(
        torch.cat([p.boxes.clamp(0, half) + offset.repeat(2) for p, offset in zip(parts, shifts, strict=True)]),
        torch.cat([p.points + offset for p, offset in zip(parts, shifts, strict=True)]),
        torch.cat([p.has_points for p in parts]),
        torch.cat([p.ignore for p in parts]),
    )


def _cut_square(
    photo: AnnotatedPhoto, size_px: int, face_px: float, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], FaceTargets, float]:
    """Scale a photo so that a random face is ``face_px`` large, and cut a square around that face.

    Returns:
        The crop, its faces, and the share of the square that the photo covers.
    """
    annotated = np.flatnonzero(~photo.doubtful & ((photo.boxes[:, 2:] - photo.boxes[:, :2]).min(1) >= 6))
    height, width = photo.image.shape[:2]
    if len(annotated) and rng.random() > NO_FACE_SHARE:
        box = photo.boxes[rng.choice(annotated)]
        # Limit the scale: strongly enlarged faces would only teach blur.
        scale = min(face_px / math.sqrt(float((box[2:] - box[:2]).prod())), 2.5)
        center = (box[:2] + box[2:]) / 2
    else:
        scale = math.exp(rng.uniform(math.log(0.4), math.log(1.5)))
        center = np.array([rng.uniform(0, width), rng.uniform(0, height)])
    stretch = math.exp(rng.normal(0, 0.05))
    scale_x, scale_y = scale * stretch, scale / stretch
    shift = rng.uniform(0.15, 0.85, 2) * size_px - center * (scale_x, scale_y)
    flip = rng.random() < 0.5
    matrix = np.array([[scale_x, 0, shift[0]], [0, scale_y, shift[1]]])
    if flip:
        matrix[0] = [-scale_x, 0, size_px - 1 - shift[0]]
    source, placed = photo.image, matrix
    if scale < 0.5:
        # Shrink first: warpAffine has no area filter, and would alias small faces unlike serving does.
        source = np.asarray(cv2.resize(source, None, fx=scale_x, fy=scale_y, interpolation=cv2.INTER_AREA), np.uint8)
        placed = matrix / [source.shape[1] / width, source.shape[0] / height, 1.0]
    image = np.asarray(cv2.warpAffine(source, placed, (size_px, size_px)), np.uint8)

    corners = photo.boxes.reshape(-1, 2, 2) @ matrix[:, :2].T + matrix[:, 2]
    boxes = np.concatenate([corners.min(1), corners.max(1)], 1)
    points = photo.points @ matrix[:, :2].T + matrix[:, 2]
    if flip:
        points = points[:, MIRRORED_LANDMARKS]
    inside = np.clip(boxes, 0, size_px)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    visible = (inside[:, 2:] - inside[:, :2]).prod(1) / np.maximum(area, 1e-6)
    seen = visible > 0
    small = (boxes[:, 2:] - boxes[:, :2]).min(1) < MIN_LEARNED_FACE_PX
    ignore = photo.doubtful | small | (visible < 0.4)
    known = np.isfinite(points).all((1, 2))
    edges = np.clip(np.array([[0, 0], [width, height]]) @ matrix[:, :2].T + matrix[:, 2], 0, size_px)
    faces = FaceTargets(
        torch.from_numpy(boxes[seen].astype(np.float32)),
        torch.from_numpy(np.nan_to_num(points[seen]).astype(np.float32)),
        torch.from_numpy(known[seen]),
        torch.from_numpy(ignore[seen]),
    )
    return image, faces, float(np.abs(edges[1] - edges[0]).prod()) / size_px**2


def texture(image: NDArray[np.uint8], smallest_face_px: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return a face-free texture: shuffled tiles of the photo, its spectrum with random phases, or noise."""
    tile = int(rng.integers(TILE_SIZES_PX[0], TILE_SIZES_PX[1] + 1))
    kind = rng.integers(3)
    if kind == 0 and smallest_face_px > MIN_FACE_TILES * tile:
        return _shuffled(image, tile, rng)
    if kind == 1:
        return np.clip(rng.normal(rng.uniform(60, 200), rng.uniform(10, 80), image.shape), 0, 255).astype(np.uint8)
    phases = np.exp(1j * np.angle(np.fft.rfft2(rng.normal(size=image.shape[:2]))))
    spectrum = np.fft.rfft2(image.astype(np.float32), axes=(0, 1)) * phases[..., None]
    spectrum[0, 0] = np.abs(spectrum[0, 0])  # keep the mean color
    return np.clip(np.fft.irfft2(spectrum, image.shape[:2], axes=(0, 1)), 0, 255).astype(np.uint8)


def _shuffled(image: NDArray[np.uint8], tile: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    rows, columns = (side // tile for side in image.shape[:2])
    inner = image[: rows * tile, : columns * tile]
    tiles = inner.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
    tiles = tiles[rng.permutation(len(tiles))]
    out = image.copy()
    out[: rows * tile, : columns * tile] = (
        tiles.reshape(rows, columns, tile, tile, 3).swapaxes(1, 2).reshape(inner.shape)
    )
    return out


def _recolor(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    out = image.astype(np.float32)
    if rng.random() < 0.15:
        out[:] = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None]
    shift = (rng.uniform(-40, 40) + rng.normal(0, 8, 3)).astype(np.float32)
    out = (out - 128) * np.float32(rng.uniform(0.6, 1.4)) + 128 + shift
    if rng.random() < 0.15:
        out = np.asarray(cv2.GaussianBlur(out, (0, 0), rng.uniform(0.4, 1.5)), np.float32)
    if rng.random() < 0.15:
        out = out + rng.normal(0, rng.uniform(1, 12), out.shape).astype(np.float32)
    stored = np.clip(out, 0, 255).astype(np.uint8)
    if rng.random() < JPEG_SHARE:
        _, encoded = cv2.imencode(".jpg", stored, [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(25, 95))])
        stored = np.asarray(cv2.imdecode(encoded, cv2.IMREAD_COLOR), np.uint8)
    return stored

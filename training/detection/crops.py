"""Random crops of photos and composed pages, as a detector's input: faces of all sizes, and what is no face.

The teacher says what is in a crop. So no labels go with them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.vision.detection import Detector, downscale
from training.config import ConfigError
from training.data.folders import photos_below
from training.data.identities import is_excluded, map_in_threads, read_rgb
from training.data.subsampling import evenly_spaced_rows

Pixels = NDArray[np.uint8]
MAX_PHOTOS: Final = 16_000
"""Photos of a folder that are used, since they are kept in memory."""
MAX_SIDE_PX: Final = 768
PORTRAIT_SHARE: Final = 0.4
"""Size of a portrait's face, as a share of the photo's longer side."""
FACE_SIZES_PX: Final = (10.0, 300.0)
KIND_WEIGHTS: Final = {"scene": 0.42, "portrait": 0.12, "page": 0.38, "background": 0.08}
"""Shares of the kinds of crops, where the photos allow all of them."""
TURNED_SHARE: Final = 0.12
"""Share of crops that are turned by a multiple of 90 degrees."""
RANDOM_PLACE_SHARE: Final = 0.08
TEXTURE_SHARE: Final = 0.06
"""Share of crops replaced by textures with the colors of a photo."""
JPEG_SHARE: Final = 0.3
MIN_COVERED_SHARE: Final = 0.6
"""Share of a crop that the photo covers, below which four photos share the crop."""
MAX_PAGE_FACE_SHARE: Final = 0.6
"""Size of the largest faces of a composed page, as a share of its side."""
MAX_PAGE_FACES: Final = 16
SHEET_SHARE: Final = 0.3
"""Share of the pages whose portraits lie on a grid, as on a contact sheet."""
OVAL_SHARE: Final = 0.5
"""Share of the other pages whose portraits are ovals with soft edges instead of rectangles."""


@dataclass(frozen=True, eq=False)
class Photo:
    """(H, W, 3) uint8 RGB image and the (n, 4) boxes of its faces."""

    image: Pixels
    boxes: NDArray[np.float32]

    def sizes(self) -> NDArray[np.float32]:
        """Return the (n,) sizes of the faces in pixels."""
        return np.asarray(np.sqrt((self.boxes[:, 2:] - self.boxes[:, :2]).clip(0).prod(1)), np.float32)


@dataclass(frozen=True)
class Photos:
    """Photos of one training run, by what their crops show.

    Attributes:
        scenes: faces in their surroundings.
        portraits: one face fills the photo. They also become the faces of composed pages.
        backgrounds: no faces.
    """

    scenes: list[Photo]
    portraits: list[Photo]
    backgrounds: list[Photo]

    def counts(self) -> dict[str, int]:
        """Return the number of photos of each kind."""
        return {name: len(getattr(self, name)) for name in ("scenes", "portraits", "backgrounds")}


def load_photos(folders: Sequence[Path], detector: Detector, excluded: Collection[Path | str] = ()) -> Photos:
    """Read at most MAX_PHOTOS of each folder, evenly spaced by name, and find their faces. Raises ConfigError: there is
    no photo with a face, or a photo cannot be decoded."""

    def read(file: Path) -> Photo:
        image = read_rgb(file)
        image = downscale(image, min(1.0, MAX_SIDE_PX / max(image.shape[:2])))
        return Photo(image, detector.detect([image])[0].boxes_xyxy)

    files: list[Path] = []
    for folder in folders:
        found = [file for file in photos_below(folder).photos if not is_excluded(file, excluded)]
        files += [found[row] for row in evenly_spaced_rows(len(found), min(MAX_PHOTOS, len(found)))]
    photos = sort_photos(tqdm(map_in_threads(read, files), total=len(files), desc="read", unit="photo"))
    if not photos.scenes and not photos.portraits:
        raise ConfigError("no photo has a face. Name a folder of photos of people")
    return photos


def sort_photos(photos: Iterable[Photo]) -> Photos:
    """Sort photos by the size of their largest face."""
    kinds = Photos([], [], [])
    for photo in photos:
        if not len(photo.boxes):
            kinds.backgrounds.append(photo)
        elif photo.sizes().max() >= PORTRAIT_SHARE * max(photo.image.shape[:2]):
            kinds.portraits.append(photo)
        else:
            kinds.scenes.append(photo)
    return kinds


def draw_crop(photos: Photos, size_px: int, rng: np.random.Generator) -> Pixels:
    """Return one (size_px, size_px, 3) crop: scaled, shifted, mirrored, recolored. One random face gets a size drawn
    log-uniformly from FACE_SIZES_PX."""
    low, high = FACE_SIZES_PX
    face_px = math.exp(rng.uniform(math.log(low), math.log(min(high, size_px * 0.9))))
    kind = _choose_kind(photos, rng)
    if kind == "background":
        image = background_crop(photos.backgrounds, size_px, rng)
    elif kind == "page":
        paper = background_crop(photos.backgrounds, size_px, rng)
        image = compose_page(photos.portraits, paper, min(face_px, MAX_PAGE_FACE_SHARE * size_px), rng)
    else:
        image = _photo_crop(photos.scenes if kind == "scene" else photos.portraits, size_px, face_px, rng)
        if rng.random() < TEXTURE_SHARE:
            image = texture(image, rng)
    if rng.random() < TURNED_SHARE:
        image = np.rot90(image, int(rng.integers(1, 4)))
    return np.ascontiguousarray(recolor(image, rng))


def _choose_kind(photos: Photos, rng: np.random.Generator) -> str:
    """Choose a kind of crop by KIND_WEIGHTS, among those that the photos allow."""
    possible = {
        "scene": len(photos.scenes) > 0,
        "portrait": len(photos.portraits) > 0,
        "page": len(photos.portraits) > 0 and len(photos.backgrounds) > 0,
        "background": len(photos.backgrounds) > 0,
    }
    weights = np.array([KIND_WEIGHTS[kind] * possible[kind] for kind in KIND_WEIGHTS])
    return list(KIND_WEIGHTS)[int(rng.choice(len(weights), p=weights / weights.sum()))]


def _photo_crop(photos: Sequence[Photo], size_px: int, face_px: float, rng: np.random.Generator) -> Pixels:
    """Cut a square of one photo, or four squares of four photos where one would cover little."""
    image, covered = _cut_square(_any(photos, rng), size_px, face_px, rng)
    if covered >= MIN_COVERED_SHARE:
        return image
    half = size_px // 2
    a, b, c, d = (_cut_square(_any(photos, rng), half, min(face_px, half * 0.7), rng)[0] for _ in range(4))
    return np.vstack([np.hstack([a, b]), np.hstack([c, d])])


def _any(photos: Sequence[Photo], rng: np.random.Generator) -> Photo:
    return photos[int(rng.integers(len(photos)))]


def _cut_square(photo: Photo, size_px: int, face_px: float, rng: np.random.Generator) -> tuple[Pixels, float]:
    """Scale a photo so that a random face is ``face_px`` large, and cut a square around that face. Returns: The crop,
    and the share of it that the photo covers."""
    height, width = photo.image.shape[:2]
    if rng.random() > RANDOM_PLACE_SHARE:
        row = int(rng.integers(len(photo.boxes)))
        # Strongly enlarged faces would only teach blur.
        scale = min(face_px / float(photo.sizes()[row]), 2.5)
        center = (photo.boxes[row, :2] + photo.boxes[row, 2:]) / 2
    else:
        scale = math.exp(rng.uniform(math.log(0.4), math.log(1.5)))
        center = np.array([rng.uniform(0, width), rng.uniform(0, height)])
    stretch = math.exp(rng.normal(0, 0.05))
    scale_x, scale_y = scale * stretch, scale / stretch
    shift = rng.uniform(0.15, 0.85, 2) * size_px - center * (scale_x, scale_y)
    matrix = np.array([[scale_x, 0, shift[0]], [0, scale_y, shift[1]]])
    corners = np.clip(np.array([[0, 0], [width, height]]) @ matrix[:, :2].T + matrix[:, 2], 0, size_px)
    if rng.random() < 0.5:
        matrix[0] = [-scale_x, 0, size_px - 1 - shift[0]]
    source = photo.image
    if scale < 0.5:
        # warpAffine has no area filter, and would alias small faces, unlike serving.
        source = np.asarray(cv2.resize(source, None, fx=scale_x, fy=scale_y, interpolation=cv2.INTER_AREA), np.uint8)
        matrix = matrix / [source.shape[1] / width, source.shape[0] / height, 1.0]
    image = np.asarray(cv2.warpAffine(source, matrix, (size_px, size_px)), np.uint8)
    return image, float((corners[1] - corners[0]).prod()) / size_px**2


def background_crop(backgrounds: Sequence[Photo], size_px: int, rng: np.random.Generator) -> Pixels:
    """Cut a random (size_px, size_px, 3) square of a random background, scaled at random, mirrored at its edges."""
    image = _any(backgrounds, rng).image
    height, width = image.shape[:2]
    smallest = size_px / max(height, width)
    scale = math.exp(rng.uniform(math.log(smallest), math.log(max(1.5, 1.2 * smallest))))
    scaled = _resize(image, (max(8, round(width * scale)), max(8, round(height * scale))))
    missing = [max(0, size_px - side) for side in scaled.shape[:2]]
    wide = cv2.copyMakeBorder(
        scaled, missing[0] // 2, -(-missing[0] // 2), missing[1] // 2, -(-missing[1] // 2), cv2.BORDER_REFLECT_101
    )
    y, x = (int(rng.integers(side - size_px + 1)) for side in wide.shape[:2])
    crop = wide[y : y + size_px, x : x + size_px]
    return np.ascontiguousarray(crop[:, ::-1] if rng.random() < 0.5 else crop, dtype=np.uint8)


def _resize(image: Pixels, size: tuple[int, int]) -> Pixels:
    interpolation = cv2.INTER_AREA if size[0] < image.shape[1] else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, size, interpolation=interpolation), np.uint8)


def compose_page(portraits: Sequence[Photo], paper: Pixels, face_px: float, rng: np.random.Generator) -> Pixels:
    """Paste portraits on a square background.

    Args:
        paper: (s, s, 3) uint8 RGB background. It is overwritten and returned.
        face_px: middle size of the faces, in pixels of the page.
    """
    size_px = len(paper)
    sheet, oval = rng.random() < SHEET_SHARE, rng.random() < OVAL_SHARE
    pitch = face_px * rng.uniform(1.5, 2.2)
    room = max(1, int(size_px / pitch) ** 2)
    if sheet:
        first = rng.uniform(-pitch / 2, pitch / 2, 2)
        steps = np.arange(0, min(size_px, 8 * pitch), pitch)
        for corner in ((round(first[0] + x), round(first[1] + y)) for y in steps for x in steps):
            patch = cut_portrait(_any(portraits, rng), face_px, rng.uniform(1.15, 2.2), rng, pitch)
            _paste(paper, patch, corner, oval=False)
        return paper
    for _ in range(int(rng.integers(1, min(MAX_PAGE_FACES, room) + 1))):
        px = face_px * 2 ** rng.uniform(-0.5, 0.5)
        patch = cut_portrait(_any(portraits, rng), px, rng.uniform(1.15, 2.2), rng)
        height, width = patch.shape[:2]
        x, y = (round(rng.uniform(-0.25 * side, size_px - 0.75 * side)) for side in (width, height))
        _paste(paper, patch, (x, y), oval)
    return paper


def cut_portrait(
    photo: Photo, face_px: float, margin: float, rng: np.random.Generator, largest_px: float = math.inf
) -> Pixels:
    """Cut the largest face of a photo with ``margin`` times its size around it, scaled to ``face_px``, mirrored at
    random. ``largest_px``: maximum side of the piece, in pixels."""
    sizes = photo.sizes()
    row = int(sizes.argmax())
    scale = face_px / float(sizes[row])
    half = min(margin * float(sizes[row]), largest_px / scale) / 2
    center = (photo.boxes[row, :2] + photo.boxes[row, 2:]) / 2 + rng.uniform(-0.1, 0.1, 2) * sizes[row]
    height, width = photo.image.shape[:2]
    x0, y0 = np.maximum(np.floor(center - half), 0).astype(int)
    x1, y1 = np.minimum(np.ceil(center + half), (width, height)).astype(int)
    patch = _resize(photo.image[y0:y1, x0:x1], (max(4, round((x1 - x0) * scale)), max(4, round((y1 - y0) * scale))))
    return patch[:, ::-1] if rng.random() < 0.5 else patch


def _paste(paper: Pixels, patch: Pixels, corner: tuple[int, int], oval: bool) -> None:
    """Paste a piece, cut at the page's edges."""
    size, (height, width), (x, y) = len(paper), patch.shape[:2], corner
    x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + width, size), min(y + height, size)
    if x1 <= x0 or y1 <= y0:
        return
    part = patch[y0 - y : y1 - y, x0 - x : x1 - x]
    if not oval:
        paper[y0:y1, x0:x1] = part
        return
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    distance = np.hypot((columns + 0.5) / width * 2 - 1, (rows + 0.5) / height * 2 - 1)
    opacity = np.clip((1.05 - distance) / 0.15, 0, 1)[y0 - y : y1 - y, x0 - x : x1 - x, None]
    below = paper[y0:y1, x0:x1]
    paper[y0:y1, x0:x1] = (part * opacity + below * (1 - opacity)).astype(np.uint8)


def texture(image: Pixels, rng: np.random.Generator) -> Pixels:
    """Return a texture: shuffled tiles of the photo, its spectrum with random phases, or noise."""
    kind = rng.integers(3)
    if kind == 0:
        return _shuffled(image, int(rng.integers(12, 25)), rng)
    if kind == 1:
        return np.clip(rng.normal(rng.uniform(60, 200), rng.uniform(10, 80), image.shape), 0, 255).astype(np.uint8)
    phases = np.exp(1j * np.angle(np.fft.rfft2(rng.normal(size=image.shape[:2]))))
    spectrum = np.fft.rfft2(image.astype(np.float32), axes=(0, 1)) * phases[..., None]
    spectrum[0, 0] = np.abs(spectrum[0, 0])  # keep the mean color
    return np.clip(np.fft.irfft2(spectrum, image.shape[:2], axes=(0, 1)), 0, 255).astype(np.uint8)


def _shuffled(image: Pixels, tile: int, rng: np.random.Generator) -> Pixels:
    rows, columns = (side // tile for side in image.shape[:2])
    inner = image[: rows * tile, : columns * tile]
    tiles = inner.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
    tiles = tiles[rng.permutation(len(tiles))]
    out = image.copy()
    out[: rows * tile, : columns * tile] = (
        tiles.reshape(rows, columns, tile, tile, 3).swapaxes(1, 2).reshape(inner.shape)
    )
    return out


def recolor(image: Pixels, rng: np.random.Generator) -> Pixels:
    """Change contrast, brightness and colors as cameras do; some images turn gray, blurred, noisy or compressed."""
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

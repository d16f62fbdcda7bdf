"""Simulated photos of screens and prints that show a face, for tests.

The simulation repeats main effects of such photos. It has neither the variety nor the look of real ones: error rates on
it say nothing about real attacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float

Photo = NDArray[np.uint8]
GAMMA: Final = 2.2
STRIPES: Final = 3
"""Samples per screen pixel in each direction: its red, green and blue stripes."""
SCREEN_ANGLES_DEG: Final = (15.0, 75.0, 0.0)
"""Angles of the halftone screens of cyan, magenta and yellow."""


def show_on_screen(photo: Photo, rng: np.random.Generator) -> Float:
    """Return the light of a screen that shows the photo, and of its room, at the photo's size.

    Subpixels that the camera samples give moire. Gamma, gray blacks, glare and a dark frame follow.
    """
    height, width = photo.shape[:2]
    pitch = rng.uniform(0.9, 2.2)  # photo pixels per screen pixel
    columns, rows = round(width / pitch), round(height / pitch)
    shown = np.asarray(cv2.resize(photo, (columns, rows), interpolation=cv2.INTER_AREA), np.uint8)
    grid = np.repeat(np.repeat(_linear(shown, rng.uniform(1.9, 2.6)), STRIPES, 0), STRIPES, 1)
    lit = np.full((STRIPES, STRIPES, 3), 0.08, np.float32)
    lit[: STRIPES - 1] += np.eye(STRIPES, dtype=np.float32)
    grid *= np.tile(lit / lit.mean((0, 1)), (rows, columns, 1))
    # A camera's optics remove only a part of the pattern.
    seen = np.asarray(cv2.GaussianBlur(grid, (0, 0), rng.uniform(0.25, 0.6) * STRIPES / pitch), np.float32)
    light = rng.uniform(0.7, 1.1) * np.array([0.95, 1.0, 1.06], np.float32) * seen + rng.uniform(0.01, 0.05)
    y, x = np.mgrid[: light.shape[0], : light.shape[1]].astype(np.float32) / max(light.shape[:2])
    spot = ((x - rng.uniform(0, 1)) / rng.uniform(0.1, 0.4)) ** 2 + (
        (y - rng.uniform(0, 1)) / rng.uniform(0.1, 0.4)
    ) ** 2
    light += (rng.uniform(0, 0.35) * np.exp(-spot))[..., None].astype(np.float32)
    return _held_up(np.asarray(light, np.float32), rng.uniform(0.01, 0.05), width, height, rng)


def print_on_paper(photo: Photo, rng: np.random.Generator) -> Float:
    """Return the light of a print of the photo, and of its room, at the photo's size.

    Halftone dots, ink and paper colors, spread ink, uneven light and a curl follow.
    """
    height, width = photo.shape[:2]
    ink = 1 - cv2.resize(photo, (2 * width, 2 * height), interpolation=cv2.INTER_CUBIC).astype(np.float32) / 255
    period = rng.uniform(3.0, 6.0)  # of the dots, in half photo pixels
    y, x = np.mgrid[: 2 * height, : 2 * width].astype(np.float32) * (2 * math.pi / period)
    dots = np.empty_like(ink)
    for channel, angle in enumerate(np.deg2rad(SCREEN_ANGLES_DEG)):
        u, v = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
        dots[..., channel] = ink[..., channel] > 0.5 + 0.25 * (np.cos(u) + np.cos(v))
    spread = np.asarray(cv2.GaussianBlur(dots, (0, 0), rng.uniform(0.6, 1.4)), np.float32)
    paper = rng.uniform(0.75, 0.95) * np.array([1.0, rng.uniform(0.94, 1), rng.uniform(0.85, 1)], np.float32)
    light = paper * (1 - spread * (1 - rng.uniform(0.06, 0.15)))
    bend = rng.uniform(-1, 1) * np.sin(math.pi * (np.mgrid[: 2 * width] / (2 * width) + rng.uniform(0, 1)))
    light *= (1 + 0.15 * bend).astype(np.float32)[:, None]
    x, y = np.meshgrid(np.arange(2 * width), np.arange(2 * height))
    curled = (y + 0.03 * height * bend).astype(np.float32)
    bent = cv2.remap(light, x.astype(np.float32), curled, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    return _held_up(np.asarray(bent, np.float32), float(paper.mean()), width, height, rng)


ATTACKS: Final[Mapping[str, Callable[[Photo, np.random.Generator], Float]]] = MappingProxyType(
    {"screen": show_on_screen, "print": print_on_paper}
)


def take_photo(light: Float, rng: np.random.Generator) -> Photo:
    """Return the photo of (H, W, 3) linear light: blur, exposure, white balance and noise."""
    seen = cv2.GaussianBlur(light, (0, 0), rng.uniform(0.3, 0.8)) * rng.uniform(0.8, 1.2) * rng.uniform(0.95, 1.05, 3)
    pixels = 255 * np.clip(seen, 0, 1) ** (1 / GAMMA) + rng.normal(0, rng.uniform(0.5, 4), light.shape)
    return np.clip(pixels.round(), 0, 255).astype(np.uint8)


def write_simulation(photos: Sequence[tuple[str, Photo]], folder: Path) -> None:
    """Write ``live/NAME.jpg``, ``attack/screen/NAME.jpg`` and ``attack/print/NAME.jpg`` of each named photo.

    Live photos pass through the same simulated camera, so that it tells nothing about attacks.
    """
    for name, photo in photos:
        seed = list(name.encode())
        scenes = {"live": _keep, **{f"attack/{kind}": attack for kind, attack in ATTACKS.items()}}
        for i, (place, scene) in enumerate(scenes.items()):
            rng = np.random.default_rng([i, *seed])
            (folder / place).mkdir(parents=True, exist_ok=True)
            taken = cv2.cvtColor(take_photo(scene(photo, rng), rng), cv2.COLOR_RGB2BGR)
            quality = [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(75, 96))]
            cv2.imwrite(str(folder / place / f"{name}.jpg"), taken, quality)


def _keep(photo: Photo, rng: np.random.Generator) -> Float:
    """Return the light of the photo itself."""
    return _linear(photo, GAMMA)


def _linear(photo: Photo, gamma: float) -> Float:
    return np.asarray((photo.astype(np.float32) / 255) ** np.float32(gamma), np.float32)


def _held_up(light: Float, frame: float, width: int, height: int, rng: np.random.Generator) -> Float:
    """Return a (height, width, 3) view of a surface with a frame of one reflectance, rotated and in front of a wall."""
    columns = light.shape[1]
    edge = round(rng.uniform(0.01, 0.08) * columns)
    framed = cv2.copyMakeBorder(light, edge, edge, edge, edge, cv2.BORDER_CONSTANT, value=(frame,) * 3)
    scale = width / columns * rng.uniform(0.85, 1.1)
    matrix = cv2.getRotationMatrix2D((framed.shape[1] / 2, framed.shape[0] / 2), rng.uniform(-4, 4), scale)
    matrix[:, 2] += (width - framed.shape[1]) / 2, (height - framed.shape[0]) / 2
    wall = tuple(rng.uniform(0.05, 0.7) * rng.uniform(0.8, 1, 3))
    return np.asarray(
        cv2.warpAffine(framed, matrix, (width, height), flags=cv2.INTER_LINEAR, borderValue=wall), np.float32
    )

"""Photos with a box, a number and a name for each face."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from kith.wire.faces import FaceOut
from kith.wire.identification import IdentityOut
from service.cli.words import describe_result, replace_controls
from service.inference.images import ImageLimits, PhotoDecoder

MIN_SIDE_PX: Final = 1280
MAX_SIDE_PX: Final = 3200
"""Limits of the picture's longer side. Small photos are enlarged, so that names are legible."""
MAX_PHOTO_PIXELS: Final = 300_000_000
DARK, LIGHT, BLUE = (18, 21, 24), (255, 255, 255), (86, 180, 233)
COLORS: Final = {"identified": (0, 158, 115), "uncertain": (230, 159, 0), "unknown": BLUE}
"""Colors of Okabe and Ito, which color-blind people can distinguish."""
REJECTED: Final = (150, 150, 150)
Mark = tuple[Sequence[float], tuple[int, int, int], str]
"""Box x0, y0, x1, y1 in pixels of the photo, its color, and its label."""


def draw_decisions(photo: bytes, results: Sequence[IdentityOut], target: Path) -> None:
    """Write the upright photo with a box for each face, in the order of the results. Raises ImageError."""
    marks: list[Mark] = []
    for result in results:
        if result.face is not None:
            color = COLORS.get(result.outcome, REJECTED)
            marks.append((result.face.box, color, f"{len(marks) + 1} {_describe(result)}"))
    _draw(photo, marks, target)


def draw_faces(photo: bytes, faces: Sequence[FaceOut], target: Path) -> None:
    """Write the upright photo with a box for each detected face. Raises ImageError."""
    _draw(photo, [(face.box, BLUE, str(number)) for number, face in enumerate(faces, start=1)], target)


def label_area(
    box: Sequence[float], text: tuple[float, float], pad: float, size: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return the area of a label below its box, or above it where the picture ends; inside the picture if it fits.

    Args:
        box: x0, y0, x1, y1 in pixels of the picture.
        text: width and height of the text.
        size: width and height of the picture.
    """
    width, height = text[0] + 2 * pad, text[1] + 2 * pad
    x = max(0.0, min(box[0], size[0] - 1 - width))
    y = box[3] if box[3] + height < size[1] else max(0.0, box[1] - height)
    return x, y, x + width, y + height


def _describe(result: IdentityOut) -> str:
    return "" if result.outcome == "unknown" else replace_controls(describe_result(result))


def _draw(photo: bytes, marks: Sequence[Mark], target: Path) -> None:
    with closing(PhotoDecoder(ImageLimits(len(photo), MAX_PHOTO_PIXELS))) as decoder:
        image = Image.fromarray(decoder.decode(photo))
    scale = min(max(*image.size, MIN_SIDE_PX), MAX_SIDE_PX) / max(image.size)
    image = image.resize([max(1, round(side * scale)) for side in image.size], Image.Resampling.LANCZOS)
    unit = max(image.size) / MIN_SIDE_PX
    font, pen = ImageFont.load_default(18 * unit), ImageDraw.Draw(image)
    scaled = [([value * scale for value in box], color, label) for box, color, label in marks]
    for box, color, _ in scaled:
        pen.rectangle(box, outline=color, width=max(2, round(3 * unit)))
    for box, color, label in scaled:
        _, _, width, height = pen.textbbox((0, 0), label, font)
        area = label_area(box, (width, height), 4 * unit, image.size)
        pen.rectangle(area, fill=DARK, outline=color, width=max(1, round(unit)))
        pen.text((area[0] + 4 * unit, area[1] + 2 * unit), label, font=font, fill=LIGHT)
    image.save(target) if target.suffix.lower() == ".png" else image.save(target, quality=92, subsampling=0)

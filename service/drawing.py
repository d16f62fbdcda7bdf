"""Pictures for people: a photo with its faces and what was decided of them."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from service.api.schemas import IdentityOut

COLOURS = {"identified": "#1a9850", "uncertain": "#e08214", "unknown": "#4575b4"}
OTHER_COLOUR = "#808080"


def draw_decisions(photo: bytes, results: list[IdentityOut], target: Path) -> None:
    """Write the upright photo with a labelled box for every face among ``results``."""
    with Image.open(io.BytesIO(photo)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    pen = ImageDraw.Draw(image)
    size = max(12, image.width // 60)
    font = ImageFont.load_default(size)
    width = max(2, image.width // 400)
    for result in results:
        if result.face is None:
            continue
        colour = COLOURS.get(result.outcome, OTHER_COLOUR)
        x0, y0, x1, y1 = result.face.box
        pen.rectangle((x0, y0, x1, y1), outline=colour, width=width)
        for x, y in result.face.landmarks:
            pen.ellipse((x - width, y - width, x + width, y + width), fill=colour)
        text = label(result)
        left, top, right, bottom = pen.textbbox((x0, y1 + 2), text, font=font)
        pen.rectangle((left - 3, top - 2, right + 3, bottom + 2), fill=colour)
        pen.text((x0, y1 + 2), text, font=font, fill="white")
    image.save(target)


def label(result: IdentityOut) -> str:
    """One short line about a decision."""
    who = (result.name or result.subject) if result.outcome == "identified" else result.outcome.replace("_", " ")
    return f"{who} {result.similarity:.2f}" if result.similarity is not None else str(who)

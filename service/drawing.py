"""Pictures for people: a photo with its faces and what was decided of them.

What a frame means is told three times, by colour (Okabe and Ito's, which the colour-blind tell apart), by its line and
in words. Labels lie beside their faces, over no other label and within the photo; who has no room for one gets a
number, and a line below the photo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from PIL import Image, ImageDraw, ImageFont

from service.api.schemas import FaceOut, IdentityOut
from service.imaging import ImageLimits, decode
from service.words import DECISIONS, in_words, odds, shown

Line = Literal["solid", "dashed", "corners"]
Area = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels of the picture."""

LEAST_SIDE: Final = 1280
MOST_SIDE: Final = 3200
"""The picture's longer side in pixels: small photos are enlarged, so that words on them can be read; larger ones than
any screen are reduced."""
MOST_ENLARGED: Final = 8.0
FINE: Final = 4
"""Shapes are drawn so many times as large, and reduced, which smooths their edges."""
MOST_FINE_PX: Final = 1200
CROWD: Final = 8
"""More faces than this, and those who are unknown have frames alone."""
MOST_COVERED: Final = 0.12
"""Of another face, by a label."""
MOST_PIXELS: Final = 300_000_000
DARK, LIGHT, PALE = (18, 21, 24), (255, 255, 255), (176, 184, 190)


@dataclass(frozen=True)
class Style:
    colour: tuple[int, int, int]
    line: Line
    meaning: str


STYLES: Final = {
    "identified": Style((0, 158, 115), "solid", "identified"),
    "uncertain": Style((230, 159, 0), "dashed", "uncertain: a person should look"),
    "unknown": Style((86, 180, 233), "corners", "unknown"),
    "rejected_quality": Style((150, 150, 150), "dashed", DECISIONS["rejected_quality"]),
    "rejected_liveness": Style((150, 150, 150), "dashed", DECISIONS["rejected_liveness"]),
}
FOUND: Final = Style((86, 180, 233), "solid", "face")
POOR: Final = Style((230, 159, 0), "dashed", "face that would not pass the quality gate")


@dataclass(frozen=True)
class Mark:
    """A face to be drawn: ``title`` and ``detail`` of its label, empty for none. ``rank``: who gets room first."""

    box: Area
    landmarks: list[tuple[float, float]]
    style: Style
    title: str = ""
    detail: str = ""
    rank: int = 0


def draw_decisions(photo: bytes, results: Sequence[IdentityOut], target: Path, gallery: str) -> None:
    """Write the upright photo with a labelled frame for every face among ``results``, and below it what the frames mean
    and which risk was accepted. Raises ImageError: it cannot be decoded."""
    faces = [(result.face, result) for result in results if result.face is not None]
    marks = [_decided(face, result, crowded=len(faces) > CROWD) for face, result in faces]
    _draw(photo, marks, _risk(results, gallery), target)


def draw_faces(photo: bytes, faces: Sequence[FaceOut], target: Path) -> None:
    """As :func:`draw_decisions`, of faces of whom nothing was asked."""
    marks = [
        _mark(face, FOUND if face.quality.usable else POOR, f"{number}", in_words(face.quality.reasons))
        for number, face in enumerate(faces, start=1)
    ]
    _draw(photo, marks, [], target)


def _decided(face: FaceOut, result: IdentityOut, crowded: bool) -> Mark:
    style = STYLES[result.outcome]
    chance = result.false_alarm_probability
    told = "" if chance is None else f"by chance: {odds(chance)}"
    if result.outcome == "identified":
        return replace(_mark(face, style, result.name or result.subject or "", told), rank=3)
    if result.outcome == "uncertain":
        nearest = next((each.name or each.subject for each in result.candidates), "somebody")
        return replace(_mark(face, style, f"perhaps {nearest}", told), rank=2)
    if result.outcome == "unknown":
        return replace(_mark(face, style, "" if crowded else "unknown", ""), rank=1)
    reasons = in_words(result.reasons)
    return _mark(face, style, "" if crowded else style.meaning, "" if crowded else reasons)


def _mark(face: FaceOut, style: Style, title: str, detail: str) -> Mark:
    x0, y0, x1, y1 = face.box
    return Mark((x0, y0, x1, y1), [(x, y) for x, y in face.landmarks], style, shown(title), detail)


def _risk(results: Sequence[IdentityOut], gallery: str) -> list[str]:
    risk = next((result.risk for result in results if result.risk is not None), None)
    told = f"Gallery {gallery}"
    if risk is None:
        return [told]
    if risk.fpir is not None:
        return [
            f"{told}. Accepted: {odds(risk.fpir)} searches for a stranger may name somebody. "
            "By chance: so often a stranger looks at least as much like somebody here."
        ]
    if risk.fmr is not None:
        return [f"{told}. Accepted: {odds(risk.fmr)} comparisons may take two people for one."]
    return [f"{told}. Asked for a similarity of {risk.threshold:g}, whatever its risk."]


def _draw(photo: bytes, marks: Sequence[Mark], said: list[str], target: Path) -> None:
    image = Image.fromarray(decode(photo, ImageLimits(len(photo), MOST_PIXELS)))
    longest = max(image.size)
    scale = min(MOST_ENLARGED, max(1.0, LEAST_SIDE / longest)) if longest < MOST_SIDE else MOST_SIDE / longest
    if scale != 1.0:
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.LANCZOS)
    picture = _Picture(image, [_scaled(mark, scale, image.size) for mark in marks])
    picture.frames()
    key = picture.labels()
    finished = picture.with_footer(key, said)
    finished.save(target, quality=92, subsampling=0) if target.suffix.lower() != ".png" else finished.save(target)


def _scaled(mark: Mark, scale: float, size: tuple[int, int]) -> Mark:
    """In pixels of the picture, and within it."""
    x0, y0, x1, y1 = (value * scale for value in mark.box)
    box = (max(0.0, x0), max(0.0, y0), min(size[0] - 1.0, x1), min(size[1] - 1.0, y1))
    return replace(mark, box=box, landmarks=[(x * scale, y * scale) for x, y in mark.landmarks])


class _Picture:
    """``unit``: of all lengths, the longer side's 1280th part."""

    def __init__(self, image: Image.Image, marks: Sequence[Mark]) -> None:
        self._image = image
        self._marks = marks
        self._unit = max(image.size) / LEAST_SIDE
        self._bold, self._plain = (
            _font("DejaVuSans-Bold.ttf", 19 * self._unit),
            _font("DejaVuSans.ttf", 15 * self._unit),
        )

    def frames(self) -> None:
        for mark in sorted(self._marks, key=lambda mark: mark.rank):
            side = min(mark.box[2] - mark.box[0], mark.box[3] - mark.box[1])
            width = max(1.5 * self._unit, min(3.5 * self._unit, side / 25))
            for x, y in mark.landmarks:
                radius = max(1.0, min(2.5 * self._unit, side / 50))
                for r, colour in ((radius * 1.5, DARK), (radius, LIGHT)):
                    area = (x - r, y - r, x + r, y + r)
                    self._stamp(area, colour, 0.75, lambda pen, box, _: pen.ellipse(box, fill=255))
            for thick, colour, strength in ((2.2 * width, DARK, 0.5), (width, mark.style.colour, 1.0)):
                self._frame(mark.box, mark.style.line, thick, colour, strength)

    def _frame(self, box: Area, line: Line, width: float, colour: tuple[int, int, int], strength: float) -> None:
        half = width / 2
        area = (box[0] - half, box[1] - half, box[2] + half, box[3] + half)
        radius = max(2.0, min(box[2] - box[0], box[3] - box[1]) * 0.12)

        def stroke(pen: ImageDraw.ImageDraw, inside: Area, fine: float) -> None:
            inset = tuple(edge + shift * half * fine for edge, shift in zip(inside, (1, 1, -1, -1), strict=True))
            for points in _strokes((inset[0], inset[1], inset[2], inset[3]), radius * fine, line):
                pen.line(points, fill=255, width=max(1, round(width * fine)), joint="curve")

        self._stamp(area, colour, strength, stroke)

    def _stamp(
        self,
        area: Area,
        colour: tuple[int, int, int],
        strength: float,
        draw: Callable[[ImageDraw.ImageDraw, Area, float], None],
    ) -> None:
        """Colour what ``draw`` makes white of a piece of the picture that it is given enlarged."""
        x0, y0 = int(area[0]) - 1, int(area[1]) - 1
        width, height = int(area[2]) + 2 - x0, int(area[3]) + 2 - y0
        fine = FINE if max(width, height) < MOST_FINE_PX else FINE // 2
        mask = Image.new("L", (width * fine, height * fine))
        inside = tuple((edge - origin) * fine for edge, origin in zip(area, (x0, y0, x0, y0), strict=True))
        draw(ImageDraw.Draw(mask), (inside[0], inside[1], inside[2], inside[3]), fine)
        mask = mask.reduce(fine)
        if strength < 1:
            mask = mask.point([round(value * strength) for value in range(256)])
        self._image.paste(colour, (x0, y0), mask)

    def labels(self) -> list[tuple[int, Mark]]:
        """Place them, those of rank first; gives those who have a number only."""
        placed: list[Area] = []
        numbered: list[tuple[int, Mark]] = []
        for mark in sorted(self._marks, key=lambda mark: (-mark.rank, mark.box[0] - mark.box[2])):
            if not mark.title:
                continue
            for lines in dict.fromkeys(((mark.title, mark.detail), (mark.title, ""))):
                if (area := self._room(self._extent(*lines), mark, placed)) is not None:
                    self._label(area, *lines, mark.style)
                    placed.append(area)
                    break
            else:
                number = len(numbered) + 1
                extent = self._extent(str(number), "")
                area = self._room(extent, mark, placed, least=True)
                if area is not None:
                    self._label(area, str(number), "", mark.style)
                    placed.append(area)
                numbered.append((number, mark))
        return numbered

    def _extent(self, title: str, detail: str) -> tuple[float, float]:
        pad = 7 * self._unit
        width = max(self._bold.getlength(title), self._plain.getlength(detail) if detail else 0.0)
        height = _height(self._bold) + (_height(self._plain) if detail else 0)
        return width + 2 * pad, height + pad

    def _room(self, extent: tuple[float, float], mark: Mark, placed: list[Area], least: bool = False) -> Area | None:
        """Beside the face, on no label and hardly on another face; None: there is none. ``least``: on faces, too."""
        best, cost = None, float("inf")
        for order, area in enumerate(self._places(extent, mark.box)):
            if any(_common(area, other) > 0 for other in placed) or not self._holds(area):
                continue
            others = (each.box for each in self._marks if each is not mark)
            covered = max((_common(area, box) / max(1.0, _size(box)) for box in others), default=0.0)
            own = _common(area, mark.box) / max(1.0, _size(mark.box))
            if (covered <= MOST_COVERED and own <= 2 * MOST_COVERED) or least:
                weight = covered + own + order / 1000
                if weight < cost:
                    best, cost = area, weight
        return best

    def _places(self, extent: tuple[float, float], box: Area) -> Iterator[Area]:
        (width, height), gap, edge = extent, 6 * self._unit, self._image.width - 1.0
        x0, y0, x1, y1 = box
        middle = (x0 + x1 - width) / 2
        for y in (y1 + gap, y0 - height - gap):
            for x in (middle, x0, x1 - width, min(max(0.0, middle), edge - width)):
                yield x, y, x + width, y + height
        for y in (y0, y1 - height, (y0 + y1 - height) / 2):
            for x in (x1 + gap, x0 - width - gap):
                yield x, y, x + width, y + height
        x = min(max(0.0, middle), edge - width)  # over the chin: of a face that fills the photo
        yield x, y1 - height - gap, x + width, y1 - gap

    def _holds(self, area: Area) -> bool:
        return area[0] >= 0 and area[1] >= 0 and area[2] < self._image.width and area[3] < self._image.height

    def _label(self, area: Area, title: str, detail: str, style: Style) -> None:
        radius, rim = 6 * self._unit, 1.5 * self._unit

        def plate(pen: ImageDraw.ImageDraw, inside: Area, fine: float) -> None:
            pen.rounded_rectangle(inside, radius * fine, fill=255)

        inner = (area[0] + rim, area[1] + rim, area[2] - rim, area[3] - rim)
        self._stamp(area, style.colour, 1.0, plate)
        self._stamp(inner, DARK, 1.0, plate)
        pen = ImageDraw.Draw(self._image)
        middle, top = (area[0] + area[2]) / 2, area[1] + 3.5 * self._unit
        pen.text((middle, top), title, font=self._bold, fill=LIGHT, anchor="ma")
        if detail:
            pen.text((middle, top + _height(self._bold)), detail, font=self._plain, fill=PALE, anchor="ma")

    def with_footer(self, numbered: list[tuple[int, Mark]], said: list[str]) -> Image.Image:
        """The picture above what its frames mean."""
        pad, unit = 16 * self._unit, self._unit
        room = self._image.width - 2 * pad
        counts = Counter(mark.style for mark in sorted(self._marks, key=lambda mark: -mark.rank))
        who = [f"{n}: {mark.title}{f' ({mark.detail})' if mark.detail else ''}" for n, mark in numbered]
        lines = [
            line
            for text in (["   ".join(who)] if who else []) + (said if self._marks else ["No face was found.", *said])
            for line in _wrapped(text, self._plain, room)
        ]
        swatch, row = 20 * unit, 30 * unit
        rows: list[list[tuple[Style, str, float]]] = [[]]
        x = 0.0
        for style, count in counts.items():
            text = f"{count} {style.meaning}"
            width = swatch + 8 * unit + self._plain.getlength(text) + 26 * unit
            if rows[-1] and x + width > room:
                rows.append([])
                x = 0.0
            rows[-1].append((style, text, x))
            x += width
        rows = [each for each in rows if each]
        photo_height, spacing = self._image.height, _height(self._plain) * 1.25
        height = round(1.6 * pad + len(rows) * row + len(lines) * spacing)
        canvas = Image.new("RGB", (self._image.width, photo_height + height), DARK)
        canvas.paste(self._image, (0, 0))
        self._image = canvas
        y = photo_height + 0.8 * pad
        for each in rows:
            for style, text, x in each:
                left = pad + x
                self._frame(
                    (left, y + 2 * unit, left + swatch, y + 2 * unit + swatch), style.line, 2.5 * unit, style.colour, 1
                )
                pen = ImageDraw.Draw(canvas)
                pen.text(
                    (left + swatch + 8 * unit, y + 2 * unit + swatch / 2),
                    text,
                    font=self._plain,
                    fill=LIGHT,
                    anchor="lm",
                )
            y += row
        for line in lines:
            ImageDraw.Draw(canvas).text((pad, y), line, font=self._plain, fill=PALE)
            y += spacing
        return canvas


def _strokes(box: Area, radius: float, line: Line) -> Iterator[list[tuple[float, float]]]:
    """Lines of a frame with round corners, each a list of points."""
    x0, y0, x1, y1 = box
    radius = min(radius, (x1 - x0) / 2, (y1 - y0) / 2)
    # The way around, from the end of each corner to the beginning of the next.
    for (ax, ay), (bx, by), centre, start in (
        ((x0 + radius, y0), (x1 - radius, y0), (x1 - radius, y0 + radius), 270),
        ((x1, y0 + radius), (x1, y1 - radius), (x1 - radius, y1 - radius), 0),
        ((x1 - radius, y1), (x0 + radius, y1), (x0 + radius, y1 - radius), 90),
        ((x0, y1 - radius), (x0, y0 + radius), (x0 + radius, y0 + radius), 180),
    ):
        yield _arc(centre, radius, start)
        length = max(abs(bx - ax), abs(by - ay))
        if line == "solid":
            pieces = [(0.0, 1.0)]
        elif line == "corners":
            pieces = [(0.0, 0.2), (0.8, 1.0)]
        else:
            count = max(1, round(length / max(6.0, 1.1 * radius)))
            pieces = [((n + 0.28) / count, (n + 0.72) / count) for n in range(count)]
        for begin, end in pieces:
            yield [(ax + (bx - ax) * at, ay + (by - ay) * at) for at in (begin, end)]


def _arc(centre: tuple[float, float], radius: float, start_deg: float) -> list[tuple[float, float]]:
    from math import cos, radians, sin

    angles = [radians(start_deg + 90 * step / 12) for step in range(13)]
    return [(centre[0] + radius * cos(angle), centre[1] + radius * sin(angle)) for angle in angles]


def _wrapped(text: str, font: ImageFont.FreeTypeFont, width: float) -> Iterator[str]:
    line = ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if line and font.getlength(longer) > width:
            yield line
            line = word
        else:
            line = longer
    yield line


def _common(a: Area, b: Area) -> float:
    """Pixels of both."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _size(area: Area) -> float:
    return (area[2] - area[0]) * (area[3] - area[1])


def _height(font: ImageFont.FreeTypeFont) -> float:
    return float(sum(font.getmetrics()))


@lru_cache
def _font(file: str, size: float) -> ImageFont.FreeTypeFont:
    """Of matplotlib, whose DejaVu has most of the world's letters."""
    spec = find_spec("matplotlib")
    folder = Path((spec.submodule_search_locations or ["."])[0]) if spec else Path()
    return ImageFont.truetype(folder / "mpl-data" / "fonts" / "ttf" / file, size)

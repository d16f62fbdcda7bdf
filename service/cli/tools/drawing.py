"""Annotated photos: a frame and a label for each face, and a legend below the photo.

Color, line style and text each show the decision. The colors are those of Okabe and Ito, which color-blind people can
distinguish. Labels stay within the photo and do not overlap. A face without room for its label gets a number, which
the legend explains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from math import cos, radians, sin
from pathlib import Path
from typing import Final, Literal

from PIL import Image, ImageDraw, ImageFont

from kith.wire.faces import FaceOut
from kith.wire.identification import IdentityOut
from service.core.text import OUTCOME_WORDS, describe_reasons, format_odds, replace_controls
from service.inference.images import ImageLimits, decode

Line = Literal["solid", "dashed", "corners"]
AreaPx = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels of the picture."""

MIN_SIDE_PX: Final = 1280
MAX_SIDE_PX: Final = 3200
"""Limits of the picture's longer side. Small photos are enlarged, so that labels are legible."""
MAX_SCALE: Final = 8.0
OVERSAMPLING: Final = 4
"""Factor by which shapes are drawn larger and then reduced, for smooth edges."""
MAX_OVERSAMPLED_SIDE_PX: Final = 1200
"""Side of a shape above which oversampling is halved to save memory."""
MAX_LABELED_FACES: Final = 8
"""Number of faces above which unknown faces get frames without labels."""
MAX_COVERED_SHARE: Final = 0.12
"""Share of another face that a label may cover."""
MAX_PHOTO_PIXELS: Final = 300_000_000
DARK, LIGHT, PALE = (18, 21, 24), (255, 255, 255), (176, 184, 190)


@dataclass(frozen=True)
class FrameStyle:
    """Color, line style and legend text of a frame."""

    color: tuple[int, int, int]
    line: Line
    meaning: str


STYLES: Final = {
    "identified": FrameStyle((0, 158, 115), "solid", "identified"),
    "uncertain": FrameStyle((230, 159, 0), "dashed", "uncertain: a person should look"),
    "unknown": FrameStyle((86, 180, 233), "corners", "unknown"),
    "rejected_quality": FrameStyle((150, 150, 150), "dashed", OUTCOME_WORDS["rejected_quality"]),
    "rejected_liveness": FrameStyle((150, 150, 150), "dashed", OUTCOME_WORDS["rejected_liveness"]),
}
DETECTED: Final = FrameStyle((86, 180, 233), "solid", "face")
LOW_QUALITY: Final = FrameStyle((230, 159, 0), "dashed", "face that would not pass the quality gate")


@dataclass(frozen=True)
class FaceMark:
    """Frame and label of a face. A mark without ``title`` has no label. Marks of high ``rank`` are placed first."""

    box: AreaPx
    landmarks: list[tuple[float, float]]
    style: FrameStyle
    title: str = ""
    detail: str = ""
    rank: int = 0


def draw_decisions(photo: bytes, results: Sequence[IdentityOut], target: Path, gallery: str) -> None:
    """Write the upright photo with a frame for every face, and a legend with the accepted risk.

    Raises:
        ImageError: the photo cannot be decoded.
    """
    faces = [(result.face, result) for result in results if result.face is not None]
    marks = [_decision_mark(face, result, crowded=len(faces) > MAX_LABELED_FACES) for face, result in faces]
    _draw(photo, marks, _describe_risk(results, gallery), target)


def draw_faces(photo: bytes, faces: Sequence[FaceOut], target: Path) -> None:
    """Write the upright photo with a frame for every detected face. Raises ImageError."""
    marks = [
        _face_mark(
            face, DETECTED if face.quality.usable else LOW_QUALITY, f"{number}", describe_reasons(face.quality.reasons)
        )
        for number, face in enumerate(faces, start=1)
    ]
    _draw(photo, marks, "", target)


def _decision_mark(face: FaceOut, result: IdentityOut, crowded: bool) -> FaceMark:
    style = STYLES[result.outcome]
    chance = result.false_alarm_probability
    by_chance = "" if chance is None else f"by chance: {format_odds(chance)}"
    if result.outcome == "identified":
        return replace(_face_mark(face, style, result.name or result.subject or "", by_chance), rank=3)
    if result.outcome == "uncertain":
        nearest = next((each.name or each.subject for each in result.candidates), "known")
        return replace(_face_mark(face, style, f"perhaps {nearest}", by_chance), rank=2)
    if result.outcome == "unknown":
        return replace(_face_mark(face, style, "" if crowded else "unknown", ""), rank=1)
    reasons = describe_reasons(result.reasons)
    return _face_mark(face, style, "" if crowded else style.meaning, "" if crowded else reasons)


def _face_mark(face: FaceOut, style: FrameStyle, title: str, detail: str) -> FaceMark:
    x0, y0, x1, y1 = face.box
    return FaceMark((x0, y0, x1, y1), [(x, y) for x, y in face.landmarks], style, replace_controls(title), detail)


def _describe_risk(results: Sequence[IdentityOut], gallery: str) -> str:
    risk = next((result.risk for result in results if result.risk is not None), None)
    if risk is None:
        return f"Gallery {gallery}"
    if risk.fpir is not None:
        return (
            f"Gallery {gallery}. Accepted risk: {format_odds(risk.fpir)} searches for a stranger return a name. "
            "By chance: how often a stranger scores this high in this gallery."
        )
    if risk.fmr is not None:
        return f"Gallery {gallery}. Accepted risk: {format_odds(risk.fmr)} comparisons match two different people."
    return f"Gallery {gallery}. Similarity threshold {risk.threshold:g}, at an unknown risk."


def _draw(photo: bytes, marks: Sequence[FaceMark], caption: str, target: Path) -> None:
    image = Image.fromarray(decode(photo, ImageLimits(len(photo), MAX_PHOTO_PIXELS)))
    longest = max(image.size)
    scale = min(MAX_SCALE, max(1.0, MIN_SIDE_PX / longest)) if longest < MAX_SIDE_PX else MAX_SIDE_PX / longest
    if scale != 1.0:
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.LANCZOS)
    picture = _Picture(image, [_scaled(mark, scale, image.size) for mark in marks])
    picture.frames()
    finished = picture.with_legend(picture.labels(), caption)
    finished.save(target) if target.suffix.lower() == ".png" else finished.save(target, quality=92, subsampling=0)


def _scaled(mark: FaceMark, scale: float, size: tuple[int, int]) -> FaceMark:
    """Return the mark in pixels of the picture, clipped to its edges."""
    x0, y0, x1, y1 = (value * scale for value in mark.box)
    box = (max(0.0, x0), max(0.0, y0), min(size[0] - 1.0, x1), min(size[1] - 1.0, y1))
    return replace(mark, box=box, landmarks=[(x * scale, y * scale) for x, y in mark.landmarks])


class _Picture:
    """Photo that is drawn on. All lengths are multiples of ``_unit``, the 1280th part of the longer side."""

    def __init__(self, image: Image.Image, marks: Sequence[FaceMark]) -> None:
        self._image = image
        self._marks = marks
        self._unit = max(image.size) / MIN_SIDE_PX
        self._bold = _font("DejaVuSans-Bold.ttf", 19 * self._unit)
        self._plain = _font("DejaVuSans.ttf", 15 * self._unit)

    def frames(self) -> None:
        """Draw the frames and landmarks."""
        for mark in sorted(self._marks, key=lambda mark: mark.rank):
            side = min(mark.box[2] - mark.box[0], mark.box[3] - mark.box[1])
            width = max(1.5 * self._unit, min(3.5 * self._unit, side / 25))
            for x, y in mark.landmarks:
                radius = max(1.0, min(2.5 * self._unit, side / 50))
                for r, color in ((radius * 1.5, DARK), (radius, LIGHT)):
                    area = (x - r, y - r, x + r, y + r)
                    self._stamp(area, color, 0.75, lambda pen, box, _: pen.ellipse(box, fill=255))
            for thick, color, strength in ((2.2 * width, DARK, 0.5), (width, mark.style.color, 1.0)):
                self._frame(mark.box, mark.style.line, thick, color, strength)

    def _frame(self, box: AreaPx, line: Line, width: float, color: tuple[int, int, int], strength: float) -> None:
        half = width / 2
        area = (box[0] - half, box[1] - half, box[2] + half, box[3] + half)
        radius = max(2.0, min(box[2] - box[0], box[3] - box[1]) * 0.12)

        def stroke(pen: ImageDraw.ImageDraw, inside: AreaPx, fine: float) -> None:
            inset = tuple(edge + shift * half * fine for edge, shift in zip(inside, (1, 1, -1, -1), strict=True))
            for points in _strokes((inset[0], inset[1], inset[2], inset[3]), radius * fine, line):
                pen.line(points, fill=255, width=max(1, round(width * fine)), joint="curve")

        self._stamp(area, color, strength, stroke)

    def _stamp(
        self,
        area: AreaPx,
        color: tuple[int, int, int],
        strength: float,
        draw: Callable[[ImageDraw.ImageDraw, AreaPx, float], None],
    ) -> None:
        """Blend ``color`` into the pixels that ``draw`` paints white on an enlarged mask of the area."""
        x0, y0 = int(area[0]) - 1, int(area[1]) - 1
        width, height = int(area[2]) + 2 - x0, int(area[3]) + 2 - y0
        fine = OVERSAMPLING if max(width, height) < MAX_OVERSAMPLED_SIDE_PX else OVERSAMPLING // 2
        mask = Image.new("L", (width * fine, height * fine))
        inside = tuple((edge - origin) * fine for edge, origin in zip(area, (x0, y0, x0, y0), strict=True))
        draw(ImageDraw.Draw(mask), (inside[0], inside[1], inside[2], inside[3]), fine)
        mask = mask.reduce(fine)
        if strength < 1:
            mask = mask.point([round(value * strength) for value in range(256)])
        self._image.paste(color, (x0, y0), mask)

    def labels(self) -> list[tuple[int, FaceMark]]:
        """Draw the labels in order of rank. Return the marks that got a number instead, with their numbers."""
        placed: list[AreaPx] = []
        numbered: list[tuple[int, FaceMark]] = []
        for mark in sorted(self._marks, key=lambda mark: (-mark.rank, mark.box[0] - mark.box[2])):
            if not mark.title:
                continue
            for lines in dict.fromkeys(((mark.title, mark.detail), (mark.title, ""))):
                if (area := self._free_area(self._label_size(*lines), mark, placed)) is not None:
                    self._label(area, *lines, mark.style)
                    placed.append(area)
                    break
            else:
                number = len(numbered) + 1
                area = self._free_area(self._label_size(str(number), ""), mark, placed, over_faces=True)
                if area is not None:
                    self._label(area, str(number), "", mark.style)
                    placed.append(area)
                numbered.append((number, mark))
        return numbered

    def _label_size(self, title: str, detail: str) -> tuple[float, float]:
        pad = 7 * self._unit
        width = max(self._bold.getlength(title), self._plain.getlength(detail) if detail else 0.0)
        height = _height(self._bold) + (_height(self._plain) if detail else 0)
        return width + 2 * pad, height + pad

    def _free_area(
        self, size: tuple[float, float], mark: FaceMark, placed: list[AreaPx], over_faces: bool = False
    ) -> AreaPx | None:
        """Return the best area beside the face that overlaps no label, or None.

        A label may cover faces by MAX_COVERED_SHARE, or completely if ``over_faces``.
        """
        best, lowest_cost = None, float("inf")
        for order, area in enumerate(self._candidate_areas(size, mark.box)):
            if any(_overlap(area, other) > 0 for other in placed) or not self._contains(area):
                continue
            others = (each.box for each in self._marks if each is not mark)
            covered = max((_overlap(area, box) / max(1.0, _size(box)) for box in others), default=0.0)
            own = _overlap(area, mark.box) / max(1.0, _size(mark.box))
            cost = covered + own + order / 1000
            allowed = covered <= MAX_COVERED_SHARE and own <= 2 * MAX_COVERED_SHARE
            if (allowed or over_faces) and cost < lowest_cost:
                best, lowest_cost = area, cost
        return best

    def _candidate_areas(self, size: tuple[float, float], box: AreaPx) -> Iterator[AreaPx]:
        (width, height), gap, edge = size, 6 * self._unit, self._image.width - 1.0
        x0, y0, x1, y1 = box
        middle = (x0 + x1 - width) / 2
        for y in (y1 + gap, y0 - height - gap):
            for x in (middle, x0, x1 - width, min(max(0.0, middle), edge - width)):
                yield x, y, x + width, y + height
        for y in (y0, y1 - height, (y0 + y1 - height) / 2):
            for x in (x1 + gap, x0 - width - gap):
                yield x, y, x + width, y + height
        x = min(max(0.0, middle), edge - width)  # over the chin, for a face that fills the photo
        yield x, y1 - height - gap, x + width, y1 - gap

    def _contains(self, area: AreaPx) -> bool:
        return area[0] >= 0 and area[1] >= 0 and area[2] < self._image.width and area[3] < self._image.height

    def _label(self, area: AreaPx, title: str, detail: str, style: FrameStyle) -> None:
        radius, rim = 6 * self._unit, 1.5 * self._unit

        def plate(pen: ImageDraw.ImageDraw, inside: AreaPx, fine: float) -> None:
            pen.rounded_rectangle(inside, radius * fine, fill=255)

        inner = (area[0] + rim, area[1] + rim, area[2] - rim, area[3] - rim)
        self._stamp(area, style.color, 1.0, plate)
        self._stamp(inner, DARK, 1.0, plate)
        pen = ImageDraw.Draw(self._image)
        middle, top = (area[0] + area[2]) / 2, area[1] + 3.5 * self._unit
        pen.text((middle, top), title, font=self._bold, fill=LIGHT, anchor="ma")
        if detail:
            pen.text((middle, top + _height(self._bold)), detail, font=self._plain, fill=PALE, anchor="ma")

    def with_legend(self, numbered: list[tuple[int, FaceMark]], caption: str) -> Image.Image:
        """Return the picture above a legend: frame styles, numbered labels, and the caption."""
        pad, row_height = 16 * self._unit, 30 * self._unit
        line_height = _height(self._plain) * 1.25
        width, photo_height = self._image.size
        rows = self._legend_rows(width - 2 * pad)
        labels = "   ".join(f"{n}: {mark.title}{f' ({mark.detail})' if mark.detail else ''}" for n, mark in numbered)
        texts = (labels, "" if self._marks else "No face was found.", caption)
        lines = [line for text in texts if text for line in _wrap(text, self._plain, width - 2 * pad)]
        height = round(1.6 * pad + len(rows) * row_height + len(lines) * line_height)
        canvas = Image.new("RGB", (width, photo_height + height), DARK)
        canvas.paste(self._image, (0, 0))
        self._image = canvas
        y = photo_height + 0.8 * pad
        for row in rows:
            for style, text, x in row:
                self._legend_entry(style, text, pad + x, y)
            y += row_height
        for line in lines:
            ImageDraw.Draw(canvas).text((pad, y), line, font=self._plain, fill=PALE)
            y += line_height
        return canvas

    def _legend_rows(self, width: float) -> list[list[tuple[FrameStyle, str, float]]]:
        """Return rows of at most ``width`` pixels: style, text and horizontal position of each entry."""
        counts = Counter(mark.style for mark in sorted(self._marks, key=lambda mark: -mark.rank))
        rows: list[list[tuple[FrameStyle, str, float]]] = []
        x = width
        for style, count in counts.items():
            text = f"{count} {style.meaning}"
            entry_width = 54 * self._unit + self._plain.getlength(text)
            if not rows or x + entry_width > width:
                rows.append([])
                x = 0.0
            rows[-1].append((style, text, x))
            x += entry_width
        return rows

    def _legend_entry(self, style: FrameStyle, text: str, x: float, y: float) -> None:
        side, top = 20 * self._unit, y + 2 * self._unit
        self._frame((x, top, x + side, top + side), style.line, 2.5 * self._unit, style.color, 1)
        pen, middle = ImageDraw.Draw(self._image), top + side / 2
        pen.text((x + side + 8 * self._unit, middle), text, font=self._plain, fill=LIGHT, anchor="lm")


def _strokes(box: AreaPx, radius: float, line: Line) -> Iterator[list[tuple[float, float]]]:
    """Yield the strokes of a frame with rounded corners, each a list of points."""
    x0, y0, x1, y1 = box
    radius = min(radius, (x1 - x0) / 2, (y1 - y0) / 2)
    # Clockwise: each side from the end of one corner to the start of the next, and the arc that follows.
    for (ax, ay), (bx, by), center, start in (
        ((x0 + radius, y0), (x1 - radius, y0), (x1 - radius, y0 + radius), 270),
        ((x1, y0 + radius), (x1, y1 - radius), (x1 - radius, y1 - radius), 0),
        ((x1 - radius, y1), (x0 + radius, y1), (x0 + radius, y1 - radius), 90),
        ((x0, y1 - radius), (x0, y0 + radius), (x0 + radius, y0 + radius), 180),
    ):
        yield _arc(center, radius, start)
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


def _arc(center: tuple[float, float], radius: float, start_deg: float) -> list[tuple[float, float]]:
    angles = [radians(start_deg + 90 * step / 12) for step in range(13)]
    return [(center[0] + radius * cos(angle), center[1] + radius * sin(angle)) for angle in angles]


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: float) -> Iterator[str]:
    line = ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if line and font.getlength(longer) > width:
            yield line
            line = word
        else:
            line = longer
    yield line


def _overlap(a: AreaPx, b: AreaPx) -> float:
    """Return the number of pixels in both areas."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _size(area: AreaPx) -> float:
    return (area[2] - area[0]) * (area[3] - area[1])


def _height(font: ImageFont.FreeTypeFont) -> float:
    return float(sum(font.getmetrics()))


@lru_cache
def _font(file: str, size: float) -> ImageFont.FreeTypeFont:
    """Load a DejaVu font of matplotlib. It covers Latin, Greek, Cyrillic, Arabic and Hebrew; others become boxes."""
    spec = find_spec("matplotlib")
    folder = Path((spec.submodule_search_locations or ["."])[0]) if spec else Path()
    return ImageFont.truetype(folder / "mpl-data" / "fonts" / "ttf" / file, size)

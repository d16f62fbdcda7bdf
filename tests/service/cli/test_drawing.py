"""Annotated photos are legible: labels stay within the photo and do not overlap."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kith.wire.faces import FaceOut, QualityOut
from kith.wire.identification import CandidateOut, IdentityOut
from service.cli.tools import drawing
from service.cli.tools.drawing import AreaPx, draw_decisions, draw_faces
from tests.conftest import jpeg

QUALITY = QualityOut(
    eye_distance_px=40,
    sharpness=9,
    brightness=99,
    contrast=40,
    yaw=0,
    pitch=0,
    roll_deg=0,
    score=1,
    usable=True,
    reasons=[],
)


def face(x: float, y: float, side: float) -> FaceOut:
    points = [[x + a * side, y + b * side] for a, b in ((0.3, 0.4), (0.7, 0.4), (0.5, 0.6), (0.35, 0.8), (0.65, 0.8))]
    return FaceOut(box=[x, y, x + side, y + 1.2 * side], landmarks=points, score=0.9, quality=QUALITY)


def identity(where: FaceOut, outcome: Any, name: str = "Ada Augusta King, Countess of Lovelace") -> IdentityOut:
    known = {"subject": "ada", "name": name} if outcome == "identified" else {}
    nearest = [CandidateOut(subject="ada", name=name, similarity=0.9)]
    return IdentityOut(face=where, outcome=outcome, false_alarm_probability=2e-6, candidates=nearest, **known)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AreaPx, tuple[int, int]]]:
    """Areas of drawn labels, each with the size of the picture."""
    found: list[tuple[AreaPx, tuple[int, int]]] = []
    original = drawing._Picture._label

    def label(self: Any, area: AreaPx, *rest: Any) -> None:
        found.append((area, self._image.size))
        original(self, area, *rest)

    monkeypatch.setattr(drawing._Picture, "_label", label)
    return found


@pytest.mark.parametrize("size", [(160, 120), (900, 1600), (6000, 400)], ids=str)
@pytest.mark.parametrize("faces", [1, 7, 40])
def test_labels_do_not_overlap_and_stay_in_the_photo(
    size: tuple[int, int], faces: int, tmp_path: Path, rng: np.random.Generator, placed: list[Any]
) -> None:
    width, height = size
    photo = jpeg(rng.integers(0, 256, (height, width, 3), np.uint8))
    outcomes = ("identified", "uncertain", "unknown", "rejected_quality")
    results = [
        identity(face(rng.uniform(0, 0.95 * width), rng.uniform(0, 0.9 * height), 0.1 * min(size)), outcomes[n % 4])
        for n in range(faces)
    ]
    draw_decisions(photo, results, tmp_path / "out.png", "staff")
    with Image.open(tmp_path / "out.png") as picture:
        drawn_width, drawn_height = picture.size
    assert max(drawn_width, drawn_height) >= 1280
    assert placed
    for (x0, y0, x1, y1), (inner_width, inner_height) in placed:
        assert min(x0, y0) >= 0
        assert (x1 < inner_width, y1 < inner_height) == (True, True)
        assert inner_height < drawn_height  # the legend is below
    for (one, _), (other, _) in combinations(placed, 2):
        assert max(one[0], other[0]) >= min(one[2], other[2]) or max(one[1], other[1]) >= min(one[3], other[3])


def test_frame_colors_show_the_decision(tmp_path: Path) -> None:
    photo = jpeg(Image.new("RGB", (1280, 800), "white"))
    results = [identity(face(200 + 400 * n, 300, 120), outcome) for n, outcome in enumerate(("identified", "unknown"))]
    draw_decisions(photo, results, tmp_path / "out.png", "staff")
    pixels = np.asarray(Image.open(tmp_path / "out.png")).astype(int)
    for column, outcome in ((200, "identified"), (600, "unknown")):
        edge = pixels[300:340, column - 6 : column + 6]
        away = np.abs(edge - np.array(drawing.STYLES[outcome].color)).sum(-1)
        assert away.min() < 12, outcome
    # An identified face has a complete frame; an unknown face has corners only.
    middle = pixels[360:380, 194:206].min(axis=(1, 2)), pixels[360:380, 594:606].min(axis=(1, 2))
    assert (middle[0].max() < 100, middle[1].min() > 240) == (True, True)


def test_a_photo_without_faces_gets_a_legend(tmp_path: Path) -> None:
    draw_faces(jpeg(Image.new("RGB", (300, 200))), [], tmp_path / "out.jpg")
    with Image.open(tmp_path / "out.jpg") as picture:
        assert (picture.format, picture.width, picture.height > 853) == ("JPEG", 1280, True)
        assert not picture.getexif()

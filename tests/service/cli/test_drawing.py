"""Drawn photos show a box for each face in the color of its decision, and a label inside the photo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kith.wire.faces import FaceOut, QualityOut
from kith.wire.identification import CandidateOut, IdentityOut
from service.cli.tools import drawing
from service.cli.tools.drawing import COLORS, draw_decisions, draw_faces, label_area
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


@pytest.mark.parametrize("size", [(160, 120), (900, 1600), (6000, 400)], ids=str)
def test_pictures_are_large_enough_to_read(
    size: tuple[int, int], tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, height = size
    outcomes = ("identified", "uncertain", "unknown", "rejected_quality")
    results = [
        identity(face(rng.uniform(0, 0.95 * width), rng.uniform(0, 0.9 * height), 0.1 * min(size)), outcomes[n % 4])
        for n in range(8)
    ]
    photo = jpeg(rng.integers(0, 256, (height, width, 3), np.uint8))
    draw_decisions(photo, results, tmp_path / "out.png")
    monkeypatch.setattr(drawing, "find_spec", lambda _: None)  # matplotlib, whose fonts are better
    draw_decisions(photo, results, tmp_path / "plain.png")
    for name in ("out.png", "plain.png"):
        with Image.open(tmp_path / name) as picture:
            assert 1280 <= max(picture.size) <= 3200
            assert picture.width / picture.height == pytest.approx(width / height, rel=0.02)


@pytest.mark.parametrize("box", [(0, 0, 10, 10), (90, 90, 100, 100), (40, 40, 60, 60), (-5, 95, 20, 130)], ids=str)
def test_labels_stay_in_the_picture(box: tuple[float, ...]) -> None:
    x0, y0, x1, y1 = label_area([2 * value for value in box], (60, 20), 4, (200, 200))
    assert (x0 >= 0, y0 >= 0, x1 < 200, y1 <= 200) == (True,) * 4
    assert (x1 - x0, y1 - y0) == (68, 28)


def test_colors_show_the_decision(tmp_path: Path) -> None:
    photo = jpeg(Image.new("RGB", (1280, 800), "white"))
    results = [identity(face(200 + 400 * n, 300, 120), outcome) for n, outcome in enumerate(("identified", "unknown"))]
    draw_decisions(photo, results, tmp_path / "out.png")
    pixels = np.asarray(Image.open(tmp_path / "out.png")).astype(int)
    for column, outcome in ((200, "identified"), (600, "unknown")):
        edge = pixels[300:340, column - 6 : column + 6]
        assert np.abs(edge - np.array(COLORS[outcome])).sum(-1).min() < 12, outcome


def test_a_photo_without_faces_stays_as_it_is(tmp_path: Path) -> None:
    draw_faces(jpeg(Image.new("RGB", (300, 200))), [], tmp_path / "out.jpg")
    with Image.open(tmp_path / "out.jpg") as picture:
        assert (picture.format, picture.size) == ("JPEG", (1280, 853))
        assert not picture.getexif()

"""The demo decides correctly on real photos, reports wrong decisions, and draws each face in its color."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from kith import Kith
from kith.wire.faces import FaceOut, QualityOut
from kith.wire.identification import CandidateOut, IdentityOut
from service.cli.tools import demo, drawing
from service.cli.tools.demo import GALLERY, PhotosMissingError, package_file, run_demo, varied_samples
from service.cli.tools.drawing import COLORS, draw_decisions, label_area
from tests.conftest import jpeg


def test_every_decision_is_correct(kith: Kith, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture numbers faces as the text does, from the left."""
    out = io.StringIO()
    drawn: list[Sequence[IdentityOut]] = []
    draw = drawing.draw_decisions

    def watch(photo: bytes, results: Sequence[IdentityOut], target: Path) -> None:
        drawn.append(results)
        draw(photo, results, target)

    monkeypatch.setattr(demo, "draw_decisions", watch)
    assert run_demo(kith, tmp_path, Console(file=out, width=200)), out.getvalue()
    kith.delete_gallery(GALLERY)
    assert "WRONG" not in out.getvalue()
    with Image.open(tmp_path / "decisions.png") as picture:
        assert picture.width > 500
    (results,) = drawn
    said = re.findall(r"face (\d) from the left: (\w+)", out.getvalue())
    assert said == [(str(number), each.name or each.outcome) for number, each in enumerate(results, start=1)]
    lefts = [each.face.box[0] for each in results if each.face]
    assert lefts == sorted(lefts)
    assert [name for _, name in said[:2]] == ["Robin", "Sam"]


def test_a_wrong_decision_and_missing_photos_are_reported(
    kith: Kith, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, original = io.StringIO(), Kith.create_gallery

    def accept_every_face(self: Kith, name: str, **_: Any) -> Any:
        return original(self, name, risk={"threshold": -1.0})

    monkeypatch.setattr(Kith, "create_gallery", accept_every_face)
    assert not run_demo(kith, tmp_path, Console(file=out, width=200))
    assert "WRONG" in out.getvalue()
    kith.delete_gallery(GALLERY)
    for package in ("no_such_package", "skimage"):
        with pytest.raises(PhotosMissingError, match=package if "no" in package else r"x\.png"):
            package_file(package, "x.png")


def test_every_second_sample_has_all_lights() -> None:
    """Quantization takes its ranges from one half of the samples, and measures its loss on the other."""
    means = np.array([photo.mean() for photo in varied_samples()])
    assert abs(means[::2].mean() / means[1::2].mean() - 1) < 0.1
    assert means.max() > 1.5 * means.min()


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

"""The demo reports wrong decisions (tests/test_examples.py runs a correct one), and pictures show decisions legibly."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from kith import Kith
from kith.wire.faces import FaceOut
from kith.wire.identification import CandidateOut, IdentityOut
from service.cli.tools.demo import GALLERY, PhotosMissingError, package_file, run_demo, varied_samples
from service.cli.tools.drawing import COLORS, draw_decisions, label_area
from tests.conftest import jpeg


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


def identity(x: float, y: float, side: float, outcome: Any) -> IdentityOut:
    name = "Ada Augusta King, Countess of Lovelace"
    about: dict[str, Any] = {"subject": "ada", "name": name} if outcome == "identified" else {}
    about["candidates"] = [CandidateOut(subject="ada", name=name, similarity=0.9)]
    place: dict[str, Any] = {"box": [x, y, x + side, y + 1.2 * side]}
    return IdentityOut(face=FaceOut.model_construct(**place), outcome=outcome, **about)


@pytest.mark.parametrize("size", [(160, 120), (6000, 400)], ids=str)
def test_pictures_are_large_enough_to_read(size: tuple[int, int], tmp_path: Path, rng: np.random.Generator) -> None:
    width, height = size
    outcomes = ("identified", "uncertain", "unknown", "rejected_quality")
    places = rng.uniform(0, 0.9, (8, 2)) * size
    results = [identity(x, y, 0.1 * min(size), outcomes[n % 4]) for n, (x, y) in enumerate(places.tolist())]
    photo = jpeg(np.zeros((height, width, 3), np.uint8))
    draw_decisions(photo, results, tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as picture:
        assert 1280 <= max(picture.size) <= 3200
        assert picture.width / picture.height == pytest.approx(width / height, rel=0.02)


@pytest.mark.parametrize("box", [(0, 0, 10, 10), (90, 90, 100, 100), (40, 40, 60, 60), (-5, 95, 20, 130)], ids=str)
def test_labels_stay_in_the_picture(box: tuple[float, ...]) -> None:
    x0, y0, x1, y1 = label_area([2 * value for value in box], (60, 20), 4, (200, 200))
    assert (x0 >= 0, y0 >= 0, x1 < 200, y1 <= 200) == (True,) * 4
    assert (x1 - x0, y1 - y0) == (68, 28)


def test_colors_show_the_decision(tmp_path: Path) -> None:
    photo = jpeg(Image.new("RGB", (1280, 800), "white"))
    outcomes = {200: "identified", 600: "unknown"}
    draw_decisions(photo, [identity(x, 300, 120, outcome) for x, outcome in outcomes.items()], tmp_path / "out.png")
    pixels = np.asarray(Image.open(tmp_path / "out.png")).astype(int)
    for x, outcome in outcomes.items():
        edge = pixels[300:340, x - 6 : x + 6]
        assert np.abs(edge - np.array(COLORS[outcome])).sum(-1).min() < 12, outcome

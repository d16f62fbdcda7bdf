"""The demo makes correct decisions on real photos, and reports wrong ones."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from kith import Kith
from service.cli.tools.demo import GALLERY, PhotosMissingError, package_file, run_demo, varied_samples
from service.server import embedded
from service.settings import load_settings


def test_every_decision_is_correct(tmp_path: Path) -> None:
    out = io.StringIO()
    settings = load_settings(data_dir=tmp_path / "data", log_level="WARNING")
    with embedded(settings) as url, Kith(url) as kith:
        assert run_demo(kith, tmp_path, Console(file=out, width=200)), out.getvalue()
    assert "WRONG" not in out.getvalue()
    with Image.open(tmp_path / "decisions.png") as picture:
        assert picture.width > 500


def test_a_wrong_decision_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    settings = load_settings(data_dir=tmp_path / "data", log_level="WARNING")
    original = Kith.create_gallery

    def accept_every_face(self: Kith, name: str, **_: Any) -> Any:
        return original(self, name, risk={"threshold": -1.0})

    monkeypatch.setattr(Kith, "create_gallery", accept_every_face)
    with embedded(settings) as url, Kith(url) as kith:
        assert not run_demo(kith, tmp_path, Console(file=out, width=200))
        assert kith.gallery(GALLERY).risk == {"threshold": -1.0}
    assert "WRONG" in out.getvalue()


def test_every_second_sample_has_all_lights() -> None:
    """Quantization takes its ranges from one half of the samples, and measures its loss on the other."""
    means = np.array([photo.mean() for photo in varied_samples()])
    assert abs(means[::2].mean() / means[1::2].mean() - 1) < 0.1
    assert means.max() > 1.5 * means.min()


def test_missing_photos_are_reported(tmp_path: Path) -> None:
    with pytest.raises(PhotosMissingError, match="no_such_package"):
        package_file("no_such_package", "x.png")
    with pytest.raises(PhotosMissingError, match=r"x\.png"):
        package_file("skimage", "x.png")

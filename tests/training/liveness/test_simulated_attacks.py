"""Simulated attacks show the same face, and differ from the photo that they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.vision.detection import Detector
from tests.training.liveness.simulated_attacks import ATTACKS, take_photo, write_simulation
from training.data.identities import read_rgb

Photo = NDArray[np.uint8]


@pytest.mark.parametrize("kind", ATTACKS)
def test_an_attack_shows_the_face(kind: str, astronaut: Photo, detector: Detector) -> None:
    (original,) = detector.detect([astronaut])
    for seed in range(2):
        rng = np.random.default_rng(seed)
        attack = take_photo(ATTACKS[kind](astronaut, rng), rng)
        assert attack.shape == astronaut.shape
        (faces,) = detector.detect([attack])
        shift = faces.landmarks_xy[faces.largest()] - original.landmarks_xy[original.largest()]
        assert np.abs(shift).max() < 0.15 * astronaut.shape[0]


def test_live_photos_and_attacks_are_equal_in_each_run(tmp_path: Path, astronaut: Photo) -> None:
    for folder in ("one", "two"):
        write_simulation([("eileen", astronaut)], tmp_path / folder)
    written = [file.relative_to(tmp_path / "one") for file in sorted((tmp_path / "one").rglob("*.jpg"))]
    assert [file.as_posix() for file in written] == [
        "attack/print/eileen.jpg",
        "attack/screen/eileen.jpg",
        "live/eileen.jpg",
    ]
    for file in written:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    away = [np.abs(read_rgb(tmp_path / "one" / file).astype(float) - astronaut).mean() for file in written]
    assert away[2] < min(away[:2])

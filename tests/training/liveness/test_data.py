"""Photos of presentations: instruments, people, and errors that name a remedy."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.manifest import LIVENESS_ALIGNMENT
from models.vision.alignment import similarity_transforms
from models.vision.detection import Detector
from tests.conftest import jpeg
from training.config import ConfigError
from training.liveness.data import LIVE, load_presentations

Photo = NDArray[np.uint8]


def put(photo: Photo, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(jpeg(photo))


@pytest.fixture
def folders(tmp_path: Path, astronaut: Photo) -> tuple[Path, Path]:
    """One live photo and attacks of two instruments; a photo without a face, and one of nothing but a face."""
    live, attack = tmp_path / "live", tmp_path / "attack"
    put(astronaut, live / "eileen" / "1.jpg")
    put(astronaut, live / "ada.jpg")
    put(astronaut, attack / "print" / "eileen" / "far.jpg")
    put(np.full((200, 200, 3), 90, np.uint8), attack / "print" / "ada.jpg")
    put(np.ascontiguousarray(astronaut[60:200, 165:290]), attack / "screen" / "grace.jpg")
    put(astronaut, attack / "screen" / "ada.jpg")
    (attack / "print" / "notes.txt").write_text("not a photo")
    (attack / ".ipynb_checkpoints").mkdir()
    return live, attack


def test_folders_name_instruments_and_people(folders: tuple[Path, Path], detector: Detector) -> None:
    found = load_presentations(*folders, detector, LIVENESS_ALIGNMENT, 0.3)
    rows = sorted(zip(found.instruments.tolist(), found.people.tolist(), strict=True))
    assert rows == [(LIVE, "ada"), (LIVE, "eileen"), ("print", "eileen"), ("screen", "ada")]
    assert found.not_judged == {LIVE: 0, "print": 1, "screen": 1}
    assert found.counts() == {LIVE: 2, "print": 1, "screen": 1}
    assert found.crops_NHWC.shape == (4, 80, 80, 3)


def test_crops_show_the_face_with_a_wide_margin(
    folders: tuple[Path, Path], detector: Detector, astronaut: Photo
) -> None:
    crop = load_presentations(*folders, detector, LIVENESS_ALIGNMENT, 0.3).crops_NHWC[0]
    (faces,) = detector.detect([astronaut])
    (matrix,) = similarity_transforms(faces.landmarks_xy[faces.largest()][None], LIVENESS_ALIGNMENT)
    expected = cv2.warpAffine(astronaut, matrix, (80, 80), borderMode=cv2.BORDER_REPLICATE)
    assert np.abs(crop.astype(float) - expected).mean() < 5  # JPEG moves the landmarks
    (inside,) = detector.detect([crop])
    eyes = inside.landmarks_xy[0, 1] - inside.landmarks_xy[0, 0]
    assert np.hypot(*eyes) == pytest.approx(80 / 5, abs=3)


def test_large_jpeg_files_are_reduced_as_the_service_does(
    tmp_path: Path, detector: Detector, astronaut: Photo, rng: np.random.Generator
) -> None:
    """Only a JPEG file loses its finest pattern."""
    large = cv2.resize(astronaut, None, fx=5, fy=5, interpolation=cv2.INTER_CUBIC)
    noisy = np.clip(large + rng.normal(0, 40, large.shape), 0, 255).astype(np.uint8)
    put(noisy, tmp_path / "live" / "a.jpg")
    put(noisy, tmp_path / "attack" / "print" / "a.jpg")
    cv2.imwrite(str(tmp_path / "live" / "b.png"), np.ascontiguousarray(noisy[..., ::-1]))
    found = load_presentations(tmp_path / "live", tmp_path / "attack", detector, LIVENESS_ALIGNMENT, 0.3)
    roughness = np.abs(np.diff(found.crops_NHWC.astype(float), axis=2)).mean((1, 2, 3))
    assert roughness[1] > 1.5 * roughness[0]


def test_errors_name_the_folder(folders: tuple[Path, Path], detector: Detector, tmp_path: Path) -> None:
    live, attack = folders
    for wrong in (live / "eileen", tmp_path):
        with pytest.raises(ConfigError, match="needs a sub-folder for each attack instrument"):
            load_presentations(live, wrong, detector, LIVENESS_ALIGNMENT, 0.3)
    put(np.zeros((99, 99, 3), np.uint8), attack / "mask" / "a.jpg")
    with pytest.raises(ConfigError, match="mask: no photo has a face"):
        load_presentations(live, attack, detector, LIVENESS_ALIGNMENT, 0.3)
    (attack / "mask" / "a.jpg").write_bytes(b"\xff\xd8 no photo")
    with pytest.raises(ConfigError, match=r"a\.jpg cannot be decoded"):
        load_presentations(live, attack, detector, LIVENESS_ALIGNMENT, 0.3)

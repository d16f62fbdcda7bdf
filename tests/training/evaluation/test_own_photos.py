"""`kith-train evaluate --people`: any network on one's own photos, without LFW."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.loading import BUNDLED_PACK
from models.vision.alignment import STANDARD_ALIGNMENT, TEMPLATE_XY, Alignment, align
from models.vision.detection import Detector
from models.vision.recognition import l2_normalize
from tests.conftest import photo_array
from training.cli.commands import app
from training.config import ConfigError
from training.data.identities import read_rgb
from training.data.subsampling import limit_per_label
from training.evaluation.embedding import embed_people
from training.run import people as people_module
from training.run.people import own_photos


def call(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run the command and return what it prints, its spaces reduced."""
    capsys.readouterr()
    app([str(word) for word in words], standalone_mode=False)
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def photos(detector: Detector, tmp_path: Path) -> Path:
    """Two people with three photos each of a real face, at different zoom, and one photo without a face."""
    root = tmp_path / "staff"
    portrait = photo_array("skimage", "data", "astronaut.png")
    faces = detector.detect([portrait])[0]
    (x, y), size = faces.landmarks_xy[faces.largest()].mean(0).astype(int), 110
    own = portrait[max(0, y - size) : y + size, x - size : x + size]
    for name, tone in (("ada", 1.0), ("bob", 0.6)):
        (root / name).mkdir(parents=True)
        for i, side in enumerate((180, 220, 260)):
            face = np.clip(cv2.resize(own, (side, side)) * tone, 0, 255).astype(np.uint8)
            face = face[:, ::-1] if name == "bob" else face
            wide = cv2.copyMakeBorder(face, 60, 60, 60, 60, cv2.BORDER_REPLICATE)
            cv2.imwrite(str(root / name / f"{i}.png"), wide[..., ::-1])
    cv2.imwrite(str(root / "bob" / "nothing.png"), photo_array("skimage", "data", "coffee.png")[..., ::-1])
    return root


@pytest.mark.usefixtures("pictures")
def test_a_pack_is_measured_on_photos(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    picture, report = tmp_path / "new" / "worst.png", tmp_path / "report.json"
    words = ("--people", photos, "--worst-pairs", picture, "--report", report)
    printed = call(capsys, "evaluate", BUNDLED_PACK, *words)
    assert "2 people, 6 photos" in printed  # none without a face
    assert "rank-1" in printed
    image = cv2.imread(str(picture))
    assert image is not None
    (found,) = json.loads(report.read_text())["people"]
    assert (found["title"], found["people"], found["photos"]) == ("staff", 2, 6)
    assert "rank-1" in found["rates"]
    assert "TAR at FAR 0.01 needs 100 pairs of different people, not 9" in found["too_small"][0]
    assert report.with_suffix(".png").read_bytes() == picture.read_bytes()


def test_large_folders_are_measured_in_part(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("evaluate", finished / "run", "--people", finished / "people", "--aligned")
    whole = call(capsys, *words)
    assert "6 people, 24 photos" in whole
    assert "TAR at FAR 0.01" in whole
    monkeypatch.setattr(people_module, "MAX_PHOTOS", 9)
    monkeypatch.setattr(people_module, "MAX_PHOTOS_PER_PERSON", 3)
    assert "3 people, 9 photos" in call(capsys, *words)


def test_a_run_that_holds_out_nothing_needs_photos(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="holds out nothing"):
        call(capsys, "evaluate", finished / "run")


def test_faces_are_aligned_for_the_embedder(photos: Path, detector: Detector, tmp_path: Path) -> None:
    """Also to a template of its own, as the service does."""
    photo, config = read_rgb(photos / "ada" / "0.png"), own_photos(photos, aligned=False)
    landmarks = detector.detect([photo])[0].landmarks_xy[:1]
    own = Alignment(112, tuple((x, y) for x, y in (1.2 * TEMPLATE_XY - 11).tolist()))

    def embed(crops: NDArray[np.uint8]) -> NDArray[np.float32]:
        return l2_normalize(crops[:, ::8, ::8].reshape(len(crops), -1).astype(np.float32))

    for alignment in (STANDARD_ALIGNMENT, own):
        choose = partial(limit_per_label, 2)
        people, vectors = embed_people(embed, alignment, detector, config, tmp_path / "cache", choose)
        assert (people.labels.tolist(), len(vectors), people.without_face) == ([0, 0, 1], 3, 1)
        np.testing.assert_allclose(vectors[0], embed(align(photo, landmarks, alignment))[0], atol=1e-6)

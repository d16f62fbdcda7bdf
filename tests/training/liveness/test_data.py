"""Liveness: photos of presentations by instrument and person, and figures that are those of the server."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from models.errors import PackError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import LIVENESS_ALIGNMENT
from models.vision.detection import Detector, largest_box
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.packs import judging_pack
from training.cli.commands import app
from training.config import ConfigError
from training.evaluation.liveness import evaluate_liveness, score_presentations
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
    assert found.crops_NHWC.shape == (4, 80, 80, 3)


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


def test_measured_scores_are_those_of_the_server(
    astronaut: NDArray[np.uint8], detector: Detector, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a large photo, which the service decodes at a reduced scale."""
    pack = judging_pack(tmp_path)
    spec = pack.liveness
    assert spec is not None
    grain = np.random.default_rng(2).normal(0, 30, (6 * 512, 6 * 512, 3))
    large = np.clip(cv2.resize(astronaut, None, fx=6, fy=6) + grain, 0, 255).astype(np.uint8)
    for place, darker in (("live", 1), ("attack/print", 2)):
        (tmp_path / place).mkdir(parents=True)
        for name, photo in (("a", astronaut // darker), ("b", large // darker)):
            (tmp_path / place / f"{name}.jpg").write_bytes(jpeg(photo))
    live, attack = tmp_path / "live", tmp_path / "attack"
    words = ["evaluate-liveness", str(pack.directory), "--live", str(live), "--attack", str(attack)]
    app(words, standalone_mode=False)
    assert "BPCER at APCER 10%" in capsys.readouterr().out
    found = load_presentations(live, attack, detector, spec.crop, spec.max_outside)
    assert len(found.people) == 4
    settings = load_settings(data_dir=tmp_path / "data", pack=pack.directory, runtime="fp32", log_level="ERROR")
    with embedded(settings) as url, Kith(url) as kith:
        for name, person, score in zip(found.instruments, found.people, score_presentations(spec, found), strict=True):
            (image,) = kith.detect((live if name == LIVE else attack / str(name)) / f"{person}.jpg").images
            face = image.faces[largest_box(np.array([face.box for face in image.faces]))]
            assert face.liveness is not None
            assert face.liveness.score == pytest.approx(score, abs=0.02)
            assert face.liveness.verdict == ("live" if score >= spec.threshold else "not_live")


def test_a_pack_without_a_liveness_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"tasks\.liveness.*manifest"):
        evaluate_liveness(load_pack(BUNDLED_PACK), tmp_path, tmp_path)

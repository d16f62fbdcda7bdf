"""Figures of a pack's liveness network are those of the server, on simulated attacks."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from kith import Kith
from models.errors import PackError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.vision.detection import Detector, largest_box
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.packs import judging_pack
from tests.training.liveness.simulated_attacks import write_simulation
from training.cli.commands import app
from training.data.identities import read_rgb
from training.evaluation.liveness import evaluate_liveness, score_presentations
from training.liveness.data import LIVE, load_presentations

PHOTOS = 10


@pytest.fixture(scope="module")
def faces(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Live photos, simulated screens and simulated prints of ten people."""
    root = tmp_path_factory.mktemp("faces")
    files = sorted((data / "scenes" / "images").iterdir())[:PHOTOS]
    write_simulation([(file.stem, read_rgb(file)) for file in files], root)
    return root


def test_measured_scores_are_those_of_the_server(
    faces: Path, detector: Detector, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = judging_pack(tmp_path)
    assert pack.liveness is not None
    folders = ["--live", str(faces / "live"), "--attack", str(faces / "attack")]
    app(["evaluate-liveness", str(pack.directory), *folders], standalone_mode=False)
    assert "BPCER at APCER 10%" in capsys.readouterr().out

    # A large photo, which the service decodes at a reduced scale.
    large = tmp_path / "large"
    for place in ("live", "attack/print"):
        (large / place).mkdir(parents=True)
        photo = cv2.resize(read_rgb(next((faces / "live").iterdir())), None, fx=6, fy=6)
        grain = np.random.default_rng(2).normal(0, 30, photo.shape)
        (large / place / "0.jpg").write_bytes(jpeg(np.clip(photo + grain, 0, 255).astype(np.uint8)))
    settings = load_settings(data_dir=tmp_path / "data", pack=pack.directory, runtime="fp32", log_level="ERROR")
    with embedded(settings) as url, Kith(url) as kith:
        for root in (faces, large):
            spec = pack.liveness
            photos = load_presentations(root / "live", root / "attack", detector, spec.crop, spec.max_outside)
            scores = score_presentations(spec, photos)
            for name, person, score in list(zip(photos.instruments, photos.people, scores, strict=True))[::5]:
                file = root / ("live" if name == LIVE else f"attack/{name}") / f"{person}.jpg"
                (image,) = kith.detect(file).images
                face = image.faces[largest_box(np.array([face.box for face in image.faces]))]
                assert face.liveness is not None
                assert face.liveness.score == pytest.approx(score, abs=0.02)
                assert face.liveness.verdict == ("live" if score >= spec.threshold else "not_live")


def test_a_pack_without_a_liveness_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"tasks\.liveness.*manifest"):
        evaluate_liveness(load_pack(BUNDLED_PACK), tmp_path, tmp_path)

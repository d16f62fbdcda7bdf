"""Figures of a pack's liveness network are those of the server."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from models.errors import PackError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.vision.detection import Detector, largest_box
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.packs import judging_pack
from training.cli.commands import app
from training.evaluation.liveness import evaluate_liveness, score_presentations
from training.liveness.data import LIVE, load_presentations


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
    assert len(found) == 4
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

"""A pack is measured on crops that are aligned once, also for its calibration and for runs."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.manifest import ModelPack
from tests.training.evaluation.test_benchmarks import write_lists
from training.evaluation import lfw
from training.evaluation.embedding import Embedder
from training.evaluation.pack_evaluation import embed_pack


def test_a_photo_without_a_face_has_no_direction(pack: ModelPack, group: NDArray[np.uint8], tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "group.png"), group)
    cv2.imwrite(str(tmp_path / "black.png"), np.zeros_like(group))
    vectors, found = Embedder(pack).embed([tmp_path / "black.png", tmp_path / "group.png"])
    assert found.tolist() == [False, True]
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([0, 1], abs=1e-5)


def test_lfw_is_aligned_once(
    pack: ModelPack,
    astronaut: NDArray[np.uint8],
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = write_lists(tmp_path / "lfw", rng)
    small = cv2.resize(cv2.cvtColor(astronaut, cv2.COLOR_RGB2BGR), None, fx=0.4, fy=0.4)
    for file in files:
        path = tmp_path / "lfw" / "images" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), small)
    whole = embed_pack(pack, tmp_path / "lfw", tmp_path / "cache", lfw.PARTS)

    def again(*_: object) -> None:
        raise AssertionError("photos are detected again")

    monkeypatch.setattr(lfw, "central_crops", again)
    view1 = embed_pack(pack, tmp_path / "lfw", tmp_path / "cache", lfw.VIEW1)
    assert set(view1.files) < set(whole.files) == set(files)
    assert np.array_equal(view1.vectors, whole.vectors[whole.rows(view1.files)])
    # A run with the standard crops uses the same ones.
    crops = lfw.load_lfw_crops(tmp_path / "lfw", pack.detection, tmp_path / "cache")
    assert crops.found.all()

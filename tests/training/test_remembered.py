"""What a network answered is answered again without it, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.alignment import align
from models.detection import Detector
from models.network import Float
from models.pack import ModelPack
from models.recognition import Recogniser
from models.runtime import OnnxNetwork
from training.remembered import Memory, RememberingDetector, RememberingRecogniser


def refuse(self: OnnxNetwork, batch: Float) -> list[Float]:
    raise AssertionError("the network was asked again")


def test_faces_are_found_once(
    pack: ModelPack, detector: Detector, group: NDArray[np.uint8], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RememberingDetector(pack.detection, tmp_path)
    black = np.zeros_like(group)
    expected = detector.detect([group])[0]
    assert [len(faces) for faces in first.detect([black, group, group])] == [0, len(expected), len(expected)]
    first.memory.save()
    again = RememberingDetector(pack.detection, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(OnnxNetwork, "run", refuse)
        nothing, faces = again.detect([black, group])
        with pytest.raises(AssertionError, match="asked again"):
            again.detect([group[:, ::-1]])
        again.min_score = 0.02
        with pytest.raises(AssertionError, match="asked again"):
            again.detect([group])
    assert len(nothing) == 0
    assert faces.landmarks_xy.shape == (len(expected), 5, 2)
    for kept, computed in (
        (faces.boxes_xyxy, expected.boxes_xyxy),
        (faces.landmarks_xy, expected.landmarks_xy),
        (faces.scores, expected.scores),
    ):
        assert kept == pytest.approx(computed, abs=1e-3)


def test_crops_are_embedded_once(
    pack: ModelPack,
    detector: Detector,
    recogniser: Recogniser,
    group: NDArray[np.uint8],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crops = align(group, detector.detect([group])[0].landmarks_xy)
    first = RememberingRecogniser(pack.recognition, tmp_path)
    first.embed(crops[:3])
    first.memory.save()
    again = RememberingRecogniser(pack.recognition, tmp_path)
    assert again.embed(crops) == pytest.approx(recogniser.embed(crops), abs=1e-5)
    monkeypatch.setattr(OnnxNetwork, "run", refuse)
    assert again.embed(crops[::-1]) == pytest.approx(recogniser_order(again, crops), abs=0)
    assert again.embed(crops[:0]).shape == (0, pack.recognition.dimension)


def recogniser_order(recogniser: RememberingRecogniser, crops: NDArray[np.uint8]) -> Float:
    return np.stack([recogniser.embed(crop[None])[0] for crop in crops[::-1]])


def test_a_memory_keeps_empty_rows(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory.npz")
    memory.save()
    assert not list(tmp_path.iterdir())
    memory[b"a" * 16], memory[b"b" * 16] = np.ones(3, np.float32), np.zeros(0, np.float32)
    memory.save()
    again = Memory(tmp_path / "memory.npz")
    assert again[b"a" * 16].tolist() == [1, 1, 1]
    assert again[b"b" * 16].shape == (0,)
    assert b"c" * 16 not in again
    assert [path.name for path in tmp_path.iterdir()] == ["memory.npz"]

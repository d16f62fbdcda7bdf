"""Cached network outputs are reused for equal inputs only."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.manifest import ModelPack
from models.runtime.network import Float
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import align
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from training.evaluation import embedding
from training.evaluation.embedding import Embedder
from training.evaluation.embedding_cache import ArrayCache, CachedDetector, CachedRecognizer


def refuse(self: OnnxNetwork, batch: Float) -> list[Float]:
    raise AssertionError("the network was called again")


def test_faces_are_found_once(
    pack: ModelPack, detector: Detector, group: NDArray[np.uint8], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CachedDetector(pack.detection, tmp_path)
    black = np.zeros_like(group)
    expected = detector.detect([group])[0]
    assert [len(faces) for faces in first.detect([black, group, group])] == [0, len(expected), len(expected)]
    first.cache.save()
    again = CachedDetector(pack.detection, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(OnnxNetwork, "run", refuse)
        nothing, faces = again.detect([black, group])
        with pytest.raises(AssertionError, match="called again"):
            again.detect([group[:, ::-1]])
        again.min_score = 0.02
        with pytest.raises(AssertionError, match="called again"):
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
    recognizer: Recognizer,
    group: NDArray[np.uint8],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crops = align(group, detector.detect([group])[0].landmarks_xy)
    first = CachedRecognizer(pack.recognition, tmp_path)
    first.embed(crops[:3])
    first.cache.save()
    again = CachedRecognizer(pack.recognition, tmp_path)
    assert again.embed(crops) == pytest.approx(recognizer.embed(crops), abs=1e-5)
    monkeypatch.setattr(OnnxNetwork, "run", refuse)
    assert again.embed(crops[::-1]) == pytest.approx(recognizer_order(again, crops), abs=0)
    assert again.embed(crops[:0]).shape == (0, pack.recognition.dimension)


def test_known_photos_are_not_decoded(
    pack: ModelPack, group: NDArray[np.uint8], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cv2.imwrite(str(tmp_path / "group.png"), group)
    cv2.imwrite(str(tmp_path / "black.png"), np.zeros_like(group))
    files = [tmp_path / "group.png", tmp_path / "black.png"]
    first = Embedder(pack, cache_dir=tmp_path / "cache")
    expected, found = first.embed(files)
    assert found.tolist() == [True, False]
    names = [file.name for file in files]
    quality = first.qualities(names, tmp_path)
    assert list(quality) == ["group.png"]
    first.save_cache()
    again = Embedder(pack, cache_dir=tmp_path / "cache")

    def unread(file: Path) -> NDArray[np.uint8]:
        raise AssertionError(f"{file} was decoded again")

    monkeypatch.setattr(embedding, "read_rgb", unread)
    vectors, seen = again.embed(files)
    assert np.array_equal(vectors, expected)
    assert seen.tolist() == found.tolist()
    assert again.qualities(names, tmp_path) == quality
    cv2.imwrite(str(files[0]), group[:-8])
    with pytest.raises(AssertionError, match=r"group\.png was decoded again"):
        again.embed(files)


def recognizer_order(recognizer: CachedRecognizer, crops: NDArray[np.uint8]) -> Float:
    return np.stack([recognizer.embed(crop[None])[0] for crop in crops[::-1]])


def test_a_cache_keeps_empty_rows(tmp_path: Path) -> None:
    memory = ArrayCache(tmp_path / "memory.npz")
    memory.save()
    assert not list(tmp_path.iterdir())
    memory[b"a" * 16], memory[b"b" * 16] = np.ones(3, np.float32), np.zeros(0, np.float32)
    memory.save()
    again = ArrayCache(tmp_path / "memory.npz")
    assert again[b"a" * 16].tolist() == [1, 1, 1]
    assert again[b"b" * 16].shape == (0,)
    assert b"c" * 16 not in again
    assert [path.name for path in tmp_path.iterdir()] == ["memory.npz"]

"""The bundled pack for commerce: the recognizer of kith-compact, and a detector whose photos permit it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector
from training.detection.photos import iou_matrix


@pytest.fixture(scope="module")
def kith_open() -> ModelPack:
    return load_pack(BUNDLED_PACK.parent / "kith-open")


def test_its_vectors_compare_with_those_of_kith_compact(kith_open: ModelPack, pack: ModelPack) -> None:
    kith_open.verify()
    assert kith_open.recognition.fingerprint() == pack.recognition.fingerprint()
    assert kith_open.detection.path.read_bytes() != pack.detection.path.read_bytes()
    assert kith_open.calibration is not None
    assert kith_open.calibration["histograms"] != (pack.calibration or {})["histograms"]  # through its own detector


def test_it_finds_the_six_faces_of_a_group_photo(
    kith_open: ModelPack, detector: Detector, group: NDArray[np.uint8], nobody: NDArray[np.uint8]
) -> None:
    found, none = Detector(OnnxNetwork(kith_open.detection.path), kith_open.detection).detect([group, nobody])
    (expected,) = detector.detect([group])
    assert len(found) == len(expected) == 6
    assert len(none) == 0
    overlaps = iou_matrix(found.boxes_xyxy, expected.boxes_xyxy)
    assert (overlaps.max(0) > 0.6).all()
    eyes = np.linalg.norm(expected.landmarks_xy[:, 0] - expected.landmarks_xy[:, 1], axis=1)
    distances = np.linalg.norm(found.landmarks_xy[overlaps.argmax(0)] - expected.landmarks_xy, axis=2).mean(1)
    assert (distances < 0.2 * eyes).all()


def test_its_card_states_data_and_terms_of_both_networks(kith_open: ModelPack) -> None:
    card = " ".join(Path(kith_open.directory / "MODEL_CARD.md").read_text().split())
    detector = kith_open.provenance["detector"]
    for text in (detector["terms"], kith_open.provenance["recognizer"]["data"]["terms"]):
        assert text in card
    assert f"{detector['run']['photos']['portraits']:,} portraits" in card
    assert "WIDER FACE and 450" not in card

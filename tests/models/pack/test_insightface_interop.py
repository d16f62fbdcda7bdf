"""InsightFace loads Kith packs, and Kith loads InsightFace directories, with equal results."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import align
from models.vision.detection import Detector
from models.vision.recognition import Recognizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from insightface.app import FaceAnalysis

DETECTION_SIDE_PX = 640


def theirs(directory: Path, photo: NDArray[np.uint8]) -> list[Any]:
    """Return the faces that InsightFace finds in an RGB photo."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses deprecated functions of scikit-image
        analysis = FaceAnalysis(name=str(directory), providers=["CPUExecutionProvider"])
        analysis.prepare(ctx_id=-1, det_size=(DETECTION_SIDE_PX, DETECTION_SIDE_PX))
        faces: list[Any] = analysis.get(cv2.cvtColor(photo, cv2.COLOR_RGB2BGR))
    return faces


@pytest.mark.parametrize("whose", ["ours in theirs", "theirs in ours"])
def test_boxes_and_embeddings_match_insightface(
    whose: str, request: pytest.FixtureRequest, group: NDArray[np.uint8]
) -> None:
    """InsightFace enlarges small photos to the detector's size, so the photo has at least that."""
    directory: Path = BUNDLED_PACK if whose == "ours in theirs" else request.getfixturevalue("reference")
    pack = load_pack(directory)
    detector = Detector(OnnxNetwork(pack.detection.path), pack.detection, buckets=(DETECTION_SIDE_PX,))
    recognizer = Recognizer(OnnxNetwork(pack.recognition.path), pack.recognition)
    (faces,) = detector.detect([group])
    vectors = recognizer.embed(align(group, faces.landmarks_xy))
    expected = theirs(directory, group)
    assert len(faces) == len(expected) >= 1
    for other in expected:
        row = faces.nearest(*((other.bbox[:2] + other.bbox[2:]) / 2))
        assert np.abs(faces.boxes_xyxy[row] - np.clip(other.bbox, 0, None)).max() <= 2
        assert np.abs(faces.landmarks_xy[row] - other.kps).max() <= 2
        assert float(vectors[row] @ (other.embedding / np.linalg.norm(other.embedding))) >= 0.999

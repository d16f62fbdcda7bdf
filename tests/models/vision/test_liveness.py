"""Liveness crops, scores and verdicts match InsightFace's addon."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.errors import PackError
from models.pack.loading import load_pack
from models.pack.manifest import LIVENESS_ALIGNMENT, MANIFEST_FILE
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import Alignment, align, similarity_transforms
from models.vision.detection import Detector
from models.vision.liveness import LivenessClassifier, cut_crops, outside_shares
from models.vision.specs import BoxCrops, LivenessSpec
from tests.networks import warmth
from tests.packs import judging_pack

Photo = NDArray[np.uint8]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> LivenessSpec:
    found = judging_pack(tmp_path_factory.mktemp("pad")).liveness
    assert found is not None
    return found


def crop_of(spec: LivenessSpec) -> Alignment:
    assert isinstance(spec.crop, Alignment)
    return spec.crop


@pytest.mark.parametrize("batch", [1, "batch"])
def test_scores_match_insightface(
    batch: int | str, spec: LivenessSpec, detector: Detector, group: Photo, tmp_path: Path
) -> None:
    addon = pytest.importorskip("insightface.addons.liveness")
    path = warmth(tmp_path / "liveness.onnx", batch)
    theirs = addon.Liveness(path, providers=["CPUExecutionProvider"])
    (faces,) = detector.detect([group])
    ours = LivenessClassifier(OnnxNetwork(path), replace(spec, path=path)).scores(
        align(group, faces.landmarks_xy, crop_of(spec), repeat_edge=True)
    )
    shares = outside_shares(faces.landmarks_xy, crop_of(spec), group.shape[1], group.shape[0])
    assert len(ours) > 3
    for score, share, points in zip(ours, shares, faces.landmarks_xy, strict=True):
        wanted = theirs.predict(np.ascontiguousarray(group[:, :, ::-1]), points)
        assert (wanted["status"] == "ok") == (share <= spec.max_outside)
        if wanted["status"] == "ok":
            assert score == pytest.approx(wanted["live_score"], abs=2e-3)


@given(x=st.floats(-100, 300), y=st.floats(-100, 300), scale=st.floats(0.2, 6), turn=st.floats(-3.2, 3.2))
def test_outside_shares_match_counted_pixels(x: float, y: float, scale: float, turn: float) -> None:
    width, height = 200, 160
    turned = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    points = (LIVENESS_ALIGNMENT.template_xy - 40) @ turned.T * scale + (x, y)
    (share,) = outside_shares(points[None].astype(np.float32), LIVENESS_ALIGNMENT, width, height)
    (matrix,) = similarity_transforms(points[None], LIVENESS_ALIGNMENT)
    shown = cv2.warpAffine(np.ones((height, width), np.float32), matrix, (80, 80), flags=cv2.INTER_LINEAR)
    assert share == pytest.approx(1 - shown.mean(), abs=0.03)


def test_logits_are_converted_to_probabilities(spec: LivenessSpec, tmp_path: Path, rng: np.random.Generator) -> None:
    crops = rng.integers(0, 256, (3, 80, 80, 3), dtype=np.uint8)
    crops[0, :, :, 0], crops[1, :, :, 2] = 255, 255
    two = OnnxNetwork(warmth(tmp_path / "two.onnx", classes=True))
    live = LivenessClassifier(two, replace(spec, live_class=1)).scores(crops)
    np.testing.assert_allclose(live, LivenessClassifier(OnnxNetwork(spec.path), spec).scores(crops), atol=1e-5)
    np.testing.assert_allclose(LivenessClassifier(two, replace(spec, live_class=0)).scores(crops), 1 - live, atol=1e-5)
    assert live[0] > 0.9 > 0.1 > live[1]
    for wrong in (None, 2):
        with pytest.raises(PackError, match="live_class"):
            LivenessClassifier(two, replace(spec, live_class=wrong)).scores(crops)
    assert LivenessClassifier(two, spec).scores(crops[:0]).shape == (0,)


def test_values_outside_0_to_1_are_rejected(spec: LivenessSpec) -> None:
    class Constant(OnnxNetwork):
        value = 0.0

        def run(self, batch: NDArray[np.float32]) -> list[NDArray[np.float32]]:
            return [np.full(len(batch), self.value, np.float32)]

    network = Constant(spec.path)
    for network.value in (0.0, 1.0, -0.1, 1.1, float("nan"), float("inf")):
        is_score = network.value in (0.0, 1.0)
        with nullcontext() if is_score else pytest.raises(PackError, match=r"outside \[0, 1\]"):
            LivenessClassifier(network, spec).scores(np.zeros((2, 80, 80, 3), np.uint8))


@pytest.mark.parametrize("task", [{"file": "recognizer.onnx"}, {"threshold": 1.5}, {"live_class": True}])
def test_errors_name_the_field(task: dict[str, Any], tmp_path: Path) -> None:
    directory = judging_pack(tmp_path).directory
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    manifest["tasks"]["liveness"] |= task
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(PackError, match=r"^tasks\.liveness"):
        load_pack(directory).verify()


@settings(max_examples=200)
@given(
    x=st.integers(-40, 400),
    y=st.integers(-40, 300),
    width=st.integers(2, 300),
    height=st.integers(2, 300),
)
def test_crops_around_boxes_are_those_of_their_authors(x: int, y: int, width: int, height: int) -> None:
    """Compare with the rule of Silent-Face-Anti-Spoofing, written down step by step: limit, center, move, truncate."""
    photo = np.random.default_rng(0).integers(0, 256, (240, 320, 3), dtype=np.uint8)
    x, y = min(max(x, 0), 320 - width - 1), min(max(y, 0), 240 - height - 1)
    assume(x >= 0 and y >= 0)
    box = np.array([x, y, x + width, y + height], np.float32)
    (cut,) = cut_crops(photo, box[None], np.empty((1, 5, 2), np.float32), BoxCrops(80, (2.7, 4.0)), 0.0)
    assert cut is not None
    assert cut.shape == (80, 160, 3)
    for number, face_size in enumerate((2.7, 4.0)):
        scale = min(face_size, 239 / height, 319 / width)
        left, right = x + width / 2 - width * scale / 2, x + width / 2 + width * scale / 2
        top, bottom = y + height / 2 - height * scale / 2, y + height / 2 + height * scale / 2
        if left < 0:
            left, right = 0, right - left
        if top < 0:
            top, bottom = 0, bottom - top
        if right > 319:
            left, right = left - (right - 319), 319
        if bottom > 239:
            top, bottom = top - (bottom - 239), 239
        edges = (left, top, right, bottom)
        # Rounding of floats may decide which row or column is the first or the last.
        assume(all(abs(edge - round(edge)) > 1e-6 or edge in (0, 319, 239) for edge in edges))
        part = photo[int(top) : int(bottom) + 1, int(left) : int(right) + 1]
        assert np.array_equal(cut[:, 80 * number : 80 * (number + 1)], cv2.resize(part, (80, 80)))

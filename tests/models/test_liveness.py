"""Crops, scores and verdicts of the hook for presentation attack detection, beside InsightFace's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.alignment import similarity_transforms
from models.detection import Detector
from models.engines import Wish, open_networks
from models.errors import PackError
from models.liveness import Judgement, Liveness, cut, outside
from models.network import Engine
from models.pack import LIVENESS_ALIGNMENT, MANIFEST, LivenessSpec, load_pack
from models.pull import _try
from models.runtime import OnnxNetwork
from tests.packs import judging_pack, warmth

Photo = NDArray[np.uint8]
ENGINES: tuple[Engine, ...] = ("onnxruntime", "openvino")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> LivenessSpec:
    found = judging_pack(tmp_path_factory.mktemp("pad")).liveness
    assert found is not None
    return found


def test_defaults_are_those_of_insightfaces_addon(spec: LivenessSpec) -> None:
    addon = pytest.importorskip("insightface.addons.liveness")
    np.testing.assert_allclose(spec.alignment.template_xy, addon.DESTINATION_LANDMARKS, rtol=1e-6)
    assert spec.alignment.size_px == addon.INPUT_SIZE
    assert (spec.threshold, spec.max_outside) == (addon.DEFAULT_THRESHOLD, addon.MAX_OOB_RATIO)


@pytest.mark.parametrize("batch", [1, "batch"])
def test_scores_are_insightfaces(
    batch: int | str, spec: LivenessSpec, detector: Detector, group: Photo, tmp_path: Path
) -> None:
    addon = pytest.importorskip("insightface.addons.liveness")
    path = warmth(tmp_path / "liveness.onnx", batch)
    theirs = addon.Liveness(path, providers=["CPUExecutionProvider"])
    (faces,) = detector.detect([group])
    ours = Liveness(OnnxNetwork(path), replace(spec, path=path)).scores(cut(group, faces.landmarks_xy, spec.alignment))
    shares = outside(faces.landmarks_xy, spec.alignment, group.shape[1], group.shape[0])
    assert len(ours) > 3
    for score, share, points in zip(ours, shares, faces.landmarks_xy, strict=True):
        wanted = theirs.predict(np.ascontiguousarray(group[:, :, ::-1]), points)
        assert (wanted["status"] == "ok") == (share <= spec.max_outside)
        if wanted["status"] == "ok":
            assert score == pytest.approx(wanted["live_score"], abs=2e-3)


@given(x=st.floats(-100, 300), y=st.floats(-100, 300), scale=st.floats(0.2, 6), turn=st.floats(-3.2, 3.2))
def test_the_share_outside_is_that_of_the_pixels(x: float, y: float, scale: float, turn: float) -> None:
    width, height = 200, 160
    turned = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    points = (LIVENESS_ALIGNMENT.template_xy - 40) @ turned.T * scale + (x, y)
    (share,) = outside(points[None].astype(np.float32), LIVENESS_ALIGNMENT, width, height)
    (matrix,) = similarity_transforms(points[None], LIVENESS_ALIGNMENT)
    shown = cv2.warpAffine(np.ones((height, width), np.float32), matrix, (80, 80), flags=cv2.INTER_LINEAR)
    assert share == pytest.approx(1 - shown.mean(), abs=0.03)


def test_beyond_the_photo_its_edge_is_repeated() -> None:
    grey = np.full((50, 50, 3), 77, np.uint8)
    points = np.asarray(LIVENESS_ALIGNMENT.template_xy - 30, np.float32)[None]
    assert (cut(grey, points, LIVENESS_ALIGNMENT) == 77).all()


def test_logits_become_a_probability(spec: LivenessSpec, tmp_path: Path, rng: np.random.Generator) -> None:
    crops = rng.integers(0, 256, (3, 80, 80, 3), dtype=np.uint8)
    crops[0, :, :, 0], crops[1, :, :, 2] = 255, 255
    two = OnnxNetwork(warmth(tmp_path / "two.onnx", classes=True))
    live = Liveness(two, replace(spec, live_class=1)).scores(crops)
    np.testing.assert_allclose(live, Liveness(OnnxNetwork(spec.path), spec).scores(crops), atol=1e-5)
    np.testing.assert_allclose(Liveness(two, replace(spec, live_class=0)).scores(crops), 1 - live, atol=1e-5)
    assert live[0] > 0.9 > 0.1 > live[1]
    for wrong in (None, 2):
        with pytest.raises(PackError, match="live_class"):
            Liveness(two, replace(spec, live_class=wrong)).scores(crops)
    assert Liveness(two, spec).scores(crops[:0]).shape == (0,)


def test_what_is_no_probability_is_refused(spec: LivenessSpec) -> None:
    class Constant(OnnxNetwork):
        value = 0.0

        def run(self, batch: NDArray[np.float32]) -> list[NDArray[np.float32]]:
            return [np.full(len(batch), self.value, np.float32)]

    network = Constant(spec.path)
    for network.value in (0.0, 1.0):
        assert Liveness(network, spec).scores(np.zeros((2, 80, 80, 3), np.uint8)).tolist() == [network.value] * 2
    for network.value in (-0.1, 1.1, float("nan"), float("inf")):
        with pytest.raises(PackError, match="no probability"):
            Liveness(network, spec).scores(np.zeros((2, 80, 80, 3), np.uint8))


def test_a_verdict_is_by_the_packs_threshold_or_anothers() -> None:
    assert Judgement(0.8, 0.8).verdict() == "live"
    assert Judgement(0.79, 0.8).verdict() == "not_live"
    assert Judgement(0.79, 0.8).verdict(0.5) == "live"
    assert Judgement(0.79, 0.8).verdict(0.0) == "live"
    assert Judgement(None, 0.0).verdict(0.0) == "not_judged"


def test_every_engine_runs_it(spec: LivenessSpec, rng: np.random.Generator) -> None:
    crops = rng.integers(0, 256, (5, 80, 80, 3), dtype=np.uint8)
    by_one, by_other = (
        Liveness(open_networks(spec, Wish(engine, "fp32")).networks[0], spec).scores(crops) for engine in ENGINES
    )
    np.testing.assert_allclose(by_one, by_other, atol=1e-4)


def test_pull_and_verify_run_it_too(tmp_path: Path) -> None:
    assert _try(judging_pack(tmp_path).directory).startswith("all three ran")


@pytest.mark.parametrize(
    "task",
    [
        {"file": "absent.onnx"},
        {"file": "recogniser.onnx"},
        {"threshold": 1.5},
        {"threshold": "0.8"},
        {"max_outside": -0.1},
        {"live_class": -1},
        {"live_class": True},
        {"input_size": [80, 81]},
        {"alignment": {"template": [[0, 0]] * 5}},
        {"preprocessing": {"mean": 0, "std": 0}},
        {"sha256": "0" * 64},
    ],
)
def test_a_task_that_cannot_be_is_refused_by_name(task: dict[str, Any], tmp_path: Path) -> None:
    directory = judging_pack(tmp_path).directory
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["tasks"]["liveness"] |= task
    (directory / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(PackError, match=r"^tasks\.liveness"):
        load_pack(directory).verify()


def test_insightface_opens_the_pack_as_it_is(tmp_path: Path) -> None:
    package = pytest.importorskip("insightface.model_zoo.package_manifest")
    assert set(package.load_model_package(judging_pack(tmp_path).directory).tasks) == {"detection", "recognition"}

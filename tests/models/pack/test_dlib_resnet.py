"""The ONNX conversion of dlib's network computes the same function."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.checksums import sha256_of
from models.pack import dlib_pack
from models.pack.catalog import read_catalog
from models.pack.dlib_resnet import DIMENSION, SIDE_PX, DlibFormatError, to_onnx
from models.pack.manifest import ModelPack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import align
from models.vision.detection import Detector
from models.vision.recognition import Recognizer, l2_normalize
from tests.models.pack.dlib_format import MEAN, Floats, integers, number, small_network, text


@pytest.fixture
def photos(rng: np.random.Generator) -> Floats:
    return rng.integers(0, 256, (3, 3, SIDE_PX, SIDE_PX)).astype(np.float32)


def test_a_converted_network_computes_the_same(rng: np.random.Generator, photos: Floats, tmp_path: Path) -> None:
    # Covers sums of tensors that differ in channels, in size, and in both.
    writer = small_network(rng, photos, [(3, False), (5, True), (5, False), (4, False), (6, True)])
    onnx.save(to_onnx(writer.content()), str(tmp_path / "small.onnx"))
    network = OnnxNetwork(tmp_path / "small.onnx")
    assert network.input_shape[1:] == (3, SIDE_PX, SIDE_PX)
    (found,) = network.run(photos)
    expected = writer.value.numpy()
    assert found.shape == (3, DIMENSION)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.replace(b"input_rgb", b"input_bgr"), "is not dlib's face recognition network"),
        (lambda c: c[: len(c) // 2], "the download is incomplete"),
        (lambda c: c.replace(b"relu_", b"sigm_", 1), "is not a layer"),
        (lambda c: c.replace(text("max_pool_2"), text("avg_pool_2"), 1), "layer 4 is avg_pool, not max_pool"),
        (lambda c: c.replace(integers(SIDE_PX, SIDE_PX), integers(200, 200), 1), "200x200 pixels"),
        (lambda c: c.replace(b"101", b"1x1", 1), "are no flags"),
        (lambda c: c.replace(number(MEAN[0]), integers(1, 32000), 1), "not finite"),
        (lambda c: c.replace(number(MEAN[0]), integers(1, 130), 1), "not finite"),
        (lambda _: b"", "is not dlib's"),
    ],
)
def test_other_and_damaged_files_are_rejected(
    change: Callable[[bytes], bytes], message: str, rng: np.random.Generator, photos: Floats
) -> None:
    content = small_network(rng, photos[:1], [(3, False)]).content()
    changed = change(content)
    assert changed != content
    with pytest.raises(DlibFormatError, match=message):
        to_onnx(changed)


@settings(max_examples=60)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_damaged_files_raise_only_the_format_error(place: float, value: int, rng: np.random.Generator) -> None:
    photos = np.zeros((1, 3, SIDE_PX, SIDE_PX), np.float32)
    content = bytearray(small_network(np.random.default_rng(1), photos, [(3, True)]).content())
    content[int(place * len(content))] = value
    with contextlib.suppress(DlibFormatError):  # changed weights convert without error
        to_onnx(bytes(content))


def test_the_shipped_calibration_matches_the_detector(pack: ModelPack) -> None:
    """Run `kith-train measure` on the pulled pack if this fails (docs/models.md)."""
    evidence = dlib_pack.read_measurements()
    assert evidence["detector_sha256"] == sha256_of(pack.detection.path)
    assert evidence["metrics"]["lfw_view2"]["accuracy"]["mean"] > 0.98
    yunet = dlib_pack.read_measurements(dlib_pack.YUNET_NAME)
    assert yunet["detector_sha256"] == read_catalog()["dlib-yunet"].downloads[1].sha256
    assert yunet["calibration"]["recognizer"] == yunet["recognizer"] == evidence["recognizer"]
    assert yunet["metrics"]["lfw_view2"]["accuracy"]["mean"] > 0.98


def test_the_published_file_becomes_the_measured_pack(dlib_file: Path, tmp_path: Path) -> None:
    source = {"from": "here", "file": dlib_file.name, "sha256": sha256_of(dlib_file), "license": "CC0-1.0"}
    pack = dlib_pack.build_dlib_pack(tmp_path, dlib_file.read_bytes(), source)
    assert pack.recognition.fingerprint() == dlib_pack.read_measurements()["recognizer"]
    assert pack.recognition.alignment == dlib_pack.dlib_alignment()
    assert json.loads((tmp_path / "manifest.json").read_text())["tasks"]["recognition"]["preprocessing"] == "embedded"
    assert pack.provenance["recognizer"]["sha256"] == source["sha256"]
    card = (tmp_path / "MODEL_CARD.md").read_text()
    assert "CC0-1.0" in card
    assert f"{pack.metrics['lfw_view2']['accuracy']['mean']:.2%}" in card


def test_embeddings_match_dlib(
    dlib_file: Path, tmp_path: Path, detector: Detector, group: NDArray[np.uint8], astronaut: NDArray[np.uint8]
) -> None:
    dlib = pytest.importorskip("dlib", reason="dlib is not installed")
    onnx.save(to_onnx(dlib_file.read_bytes()), str(tmp_path / "dlib.onnx"))
    theirs = dlib.face_recognition_model_v1(str(dlib_file))
    chips = [
        chip
        for photo in (group, astronaut, np.asarray(cv2.GaussianBlur(astronaut, (0, 0), 4), np.uint8))
        for chip in align(photo, detector.detect([photo])[0].landmarks_xy, dlib_pack.dlib_alignment())
    ]
    ours = OnnxNetwork(tmp_path / "dlib.onnx").run(np.stack(chips).transpose(0, 3, 1, 2).astype(np.float32))[0]
    expected = np.array([np.array(theirs.compute_face_descriptor(np.ascontiguousarray(chip))) for chip in chips])
    assert len(chips) >= 8
    cosines = (l2_normalize(ours).astype(np.float64) * l2_normalize(expected)).sum(1)
    assert cosines.min() >= 0.99999
    assert np.abs(ours - expected).max() < 1e-4


def test_the_pack_distinguishes_people(
    dlib_file: Path,
    tmp_path: Path,
    detector: Detector,
    astronaut: NDArray[np.uint8],
    actor: NDArray[np.uint8],
) -> None:
    source = {"from": "here", "file": dlib_file.name, "sha256": "", "license": "CC0-1.0"}
    pack = dlib_pack.build_dlib_pack(tmp_path, dlib_file.read_bytes(), source)
    recognizer = Recognizer(OnnxNetwork(pack.recognition.path), pack.recognition)
    crops = []
    for photo in (astronaut, (astronaut[:, ::-1] * 0.7).astype(np.uint8), actor):
        (faces,) = detector.detect([photo])
        crops.append(align(photo, faces.landmarks_xy[faces.largest()][None], recognizer.alignment)[0])
    first, second, third = recognizer.embed(np.stack(crops))
    assert float(first @ second) > 0.97 > 0.93 > float(first @ third)

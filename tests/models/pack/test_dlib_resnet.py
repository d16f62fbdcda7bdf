"""The ONNX conversion of dlib's network computes the same function."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import functional as F

from models.checksums import sha256_of
from models.pack import dlib_pack
from models.pack.catalog import read_catalog
from models.pack.dlib_resnet import DIMENSION, SIDE_PX, DlibFormatError, to_onnx
from models.pack.manifest import ModelPack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import align
from models.vision.detection import Detector
from models.vision.recognition import Recognizer, l2_normalize

MEAN = (122.782, 117.001, 104.298)
Floats = NDArray[np.float32]


def integer(value: int) -> bytes:
    digits = abs(value).to_bytes((abs(value).bit_length() + 7) // 8 or 1, "little")
    return bytes([len(digits) | (0x80 if value < 0 else 0)]) + digits


def integers(*values: int) -> bytes:
    return b"".join(map(integer, values))


def number(value: float) -> bytes:
    mantissa, exponent = np.frexp(value)
    return integers(int(mantissa * 2**24), int(exponent) - 24)


def text(value: str) -> bytes:
    return integer(len(value)) + value.encode()


def tensor(values: Floats) -> bytes:
    return integers(2, len(values), 1, 1, 1) + values.astype("<f4").tobytes()


class Writer:
    """Writer of dlib's format that computes the same network in torch."""

    def __init__(self, rng: np.random.Generator, photos_BCHW: torch.Tensor) -> None:
        self._rng = rng
        numbers = b"".join(map(number, MEAN))
        self._pieces = [b"\1\2head", text("input_rgb_image_sized"), numbers, integers(SIDE_PX, SIDE_PX)]
        self.value = (photos_BCHW - torch.tensor(MEAN).reshape(1, 3, 1, 1)) / 256
        self._layers = 0

    def content(self) -> bytes:
        return b"".join(self._pieces)

    def _layer(self, *pieces: bytes) -> None:
        if self._layers:
            self._pieces.append(b"101" + (integer(1) if self._layers == 1 else b""))
            self._pieces += [integers(2, 0, 0, 0, 0)] * 3
        self._pieces += pieces
        self._layers += 1

    def convolution(self, filters: int, size: int, stride: int, pad: int) -> None:
        channels = self.value.shape[1]
        weights = self._rng.normal(0, 0.3, filters * channels * size**2 + filters).astype(np.float32)
        sizes = integers(filters, size, size, stride, stride, pad, pad)
        self._layer(text("con_4"), tensor(weights), sizes, integers(*range(10)), *[number(1.0)] * 4)
        kernel = torch.from_numpy(weights[:-filters].reshape(filters, channels, size, size))
        self.value = F.conv2d(self.value, kernel, torch.from_numpy(weights[-filters:]), stride, pad)

    def affine(self) -> None:
        weights = self._rng.normal(1, 0.3, 2 * self.value.shape[1]).astype(np.float32)
        self._layer(text("affine_"), tensor(weights), integers(*range(11)))
        factors, offsets = torch.from_numpy(weights).reshape(2, 1, -1, 1, 1)
        self.value = self.value * factors + offsets

    def relu(self) -> None:
        self._layer(text("relu_"))
        self.value = F.relu(self.value)

    def pool(self, kind: str, size: int, stride: int) -> None:
        self._layer(text(kind), integers(size, size, stride, stride, 0, 0))
        if size:
            pooled = F.max_pool2d if kind == "max_pool_2" else F.avg_pool2d
            self.value = pooled(self.value, size, stride)

    def block(self, filters: int, halving: bool) -> None:
        shortcut = self.value
        self.convolution(filters, 3, 2 if halving else 1, 0 if halving else 1)
        self.affine()
        self.relu()
        self.convolution(filters, 3, 1, 1)
        self.affine()
        if halving:
            before, self.value = self.value, shortcut
            self.pool("avg_pool_2", 2, 2)
            shortcut, self.value = self.value, before
        self._layer(text("add_prev_"))
        whole = torch.zeros(
            len(shortcut), *(max(a, b) for a, b in zip(shortcut.shape[1:], self.value.shape[1:], strict=True))
        )
        for part in (shortcut, self.value):
            whole[:, : part.shape[1], : part.shape[2], : part.shape[3]] += part
        self.value = whole
        self.relu()

    def end(self) -> None:
        self.pool("avg_pool_2", 0, 1)
        channels = self.value.shape[1]
        weights = self._rng.normal(0, 0.3, channels * DIMENSION).astype(np.float32)
        self._layer(text("fc_2"), integers(DIMENSION, 0), tensor(weights))
        self.value = self.value.mean((2, 3)) @ torch.from_numpy(weights.reshape(channels, DIMENSION))


def small_network(rng: np.random.Generator, photos: Floats, blocks: Sequence[tuple[int, bool]]) -> Writer:
    writer = Writer(rng, torch.from_numpy(photos))
    writer.convolution(3, 7, 2, 0)
    writer.affine()
    writer.relu()
    writer.pool("max_pool_2", 3, 2)
    for filters, halving in blocks:
        writer.block(filters, halving)
    writer.end()
    return writer


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

"""Networks that the service cannot use are rejected at start with a PackError, on every engine; others are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from models.engines.selection import CpuNetwork, EnginePreference, open_network, open_on_device
from models.errors import PackError
from models.pack.manifest import LIVENESS_ALIGNMENT
from models.runtime.cuda_network import Device
from models.runtime.network import Engine
from models.vision.alignment import STANDARD_ALIGNMENT, standard_alignment
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from models.vision.specs import DetectionSpec, LivenessSpec, Normalization, RecognitionSpec
from tests.networks import color_network, scrfd_network, warmth

Write = Callable[[Path], Path]
Specify = Callable[[Path], DetectionSpec | RecognitionSpec | LivenessSpec]
NAN = float("nan")


@pytest.fixture(params=get_args(Engine))
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.param
    return found


def recognition(path: Path) -> RecognitionSpec:
    return RecognitionSpec(path, None, Normalization(127.5, 127.5), STANDARD_ALIGNMENT, 64, "test-1")


def detection(path: Path) -> DetectionSpec:
    return DetectionSpec(path, None, Normalization(127.5, 128.0), "scrfd")


def liveness(path: Path) -> LivenessSpec:
    return LivenessSpec(path, None, Normalization(0, 255), LIVENESS_ALIGNMENT, None, 0.8, 0.3)


def opened(spec: DetectionSpec | RecognitionSpec | LivenessSpec, engine: Engine) -> CpuNetwork:
    return open_network(spec, EnginePreference(engine, "fp32"))


def _over_the_batch(path: Path) -> Path:
    model = onnx.load(color_network(path))
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array([0, 2, 3], np.int64), "axes"))
    onnx.save(model, path)
    return path


SCORES: dict[str, Any] = {"image": ["n", 3, 80, 80], "numbers": 1, "declared": ["n", 1]}
UNUSABLE: dict[str, tuple[Specify, Write, str]] = {
    "signed bytes": (recognition, partial(color_network, dtype=TensorProto.INT8), "input of type"),
    "channels last": (recognition, partial(color_network, image=["n", 112, 112, 3], axes=(1, 2)), ", 112, 112, 3"),
    "vectors": (recognition, partial(color_network, image=["batch", 3], axes=()), "an input of"),
    "no declared input": (recognition, partial(color_network, image=None), "an input of"),
    "a larger crop": (
        recognition,
        partial(color_network, image=["batch", 3, 160, 160]),
        r", 3, 160, 160\), but the pack's crops are 112x112",
    ),
    "two outputs": (recognition, partial(color_network, outputs=2), "exactly one output"),
    "too few numbers": (
        recognition,
        partial(color_network, numbers=32, declared=["batch", "n"]),
        "is 64, the network returns 32",
    ),
    "no numbers": (recognition, partial(color_network, numbers=0, declared=["batch", 0]), "x.onnx|returns 0"),
    "undefined numbers": (recognition, partial(color_network, factor=NAN), "finite"),
    "zeros": (recognition, partial(color_network, factor=0), "zero"),
    "one vector per batch": (recognition, _over_the_batch, r"x\.onnx|embedding_dimension"),
    "no points": (detection, partial(color_network, image=["n", 3, 640, 640], outputs=6), "has 6 outputs"),
    "one anchor": (detection, partial(scrfd_network, anchors=1), "head needs"),
    "oblong photos only": (
        detection,
        partial(scrfd_network, height=480, width=640, grid=True),
        "only photos of 480x640",
    ),
    "undefined cells": (detection, partial(scrfd_network, bias=NAN), "not finite"),
    "a larger crop of liveness": (
        liveness,
        partial(warmth, side=128),
        r", 3, 128, 128\), but the pack's crops are 80x80",
    ),
    "classes": (liveness, partial(warmth, classes=True), "live_class"),
    "undefined scores": (liveness, partial(color_network, factor=NAN, **SCORES), "not finite"),
    "two scores": (liveness, partial(color_network, outputs=2, **SCORES), "exactly one output"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_unusable_networks_are_rejected(what: str, engine: Engine, tmp_path: Path) -> None:
    specify, write, said = UNUSABLE[what]
    with pytest.raises(PackError, match=said):
        opened(specify(write(tmp_path / "x.onnx")), engine)


USABLE_RECOGNIZERS: dict[str, Write] = {
    "fp16": partial(color_network, dtype=TensorProto.FLOAT16),
    "double": partial(color_network, dtype=TensorProto.DOUBLE),
    "fixed batch": partial(color_network, image=[4, 3, 112, 112], declared=[4, 64]),
    "open sides": partial(color_network, image=["n", "channels", "height", "width"]),
    "unnamed sides": partial(color_network, image=[None, 3, None, None], declared=[None, None]),
    "undeclared output": partial(color_network, declared=None),
}


@pytest.mark.parametrize("what", USABLE_RECOGNIZERS)
def test_other_recognizers_are_served(what: str, engine: Engine, tmp_path: Path, rng: np.random.Generator) -> None:
    crops = rng.integers(0, 256, (7, 112, 112, 3), dtype=np.uint8)
    plain, spec = (
        recognition(write(tmp_path / f"{n}.onnx")) for n, write in enumerate((color_network, USABLE_RECOGNIZERS[what]))
    )
    wanted = Recognizer(opened(plain, engine), plain).embed(crops)
    network = opened(spec, engine)
    given = Recognizer(network, spec).embed(crops)
    assert given.dtype == np.float32
    assert (given * wanted).sum(1).min() > 0.999
    batch = network.input_shape[0] if isinstance(network.input_shape[0], int) else 2
    assert sum(network.placement(np.zeros((batch, 3, 112, 112), np.float32)).values()) > 0


def test_a_recognizer_with_an_fp16_input_runs_on_a_gpu(tmp_path: Path, rng: np.random.Generator) -> None:
    """All but CUDA itself."""
    spec = recognition(color_network(tmp_path / "x.onnx", dtype=TensorProto.FLOAT16))
    network = open_on_device(spec, Device("cpu"))
    crops = rng.integers(0, 256, (33, 112, 112, 3), dtype=np.uint8)
    given = Recognizer(network, spec).embed(crops)
    wanted = Recognizer(opened(spec, "onnxruntime"), spec).embed(crops)
    assert (given * wanted).sum(1).min() > 0.999
    assert network.precision == "fp16"


def test_crops_of_another_size_are_served(engine: Engine, tmp_path: Path) -> None:
    spec = replace(
        recognition(color_network(tmp_path / "x.onnx", ["n", 3, 160, 160])), alignment=standard_alignment(160)
    )
    recognizer = Recognizer(opened(spec, engine), spec)
    assert recognizer.embed(np.full((2, 160, 160, 3), 9, np.uint8)).shape == (2, 64)
    with pytest.raises(ValueError, match=r"\(n, 160, 160, 3\), not \(1, 112, 112, 3\)"):
        recognizer.embed(np.zeros((1, 112, 112, 3), np.uint8))


USABLE_DETECTORS: dict[str, Write] = {
    "open": scrfd_network,
    "fp16": partial(scrfd_network, dtype=TensorProto.FLOAT16),
    "fixed square": partial(scrfd_network, height=640, width=640, grid=True),
    "oblong, opened": partial(scrfd_network, height=480, width=640),
    "fp16, opened": partial(scrfd_network, height=640, width=640, dtype=TensorProto.FLOAT16),
    "one fixed side, opened": partial(scrfd_network, height=640, width="width"),
}


@pytest.mark.parametrize("what", USABLE_DETECTORS)
def test_other_detectors_are_served(what: str, engine: Engine, tmp_path: Path, group: NDArray[np.uint8]) -> None:
    spec = detection(USABLE_DETECTORS[what](tmp_path / "x.onnx"))
    detector = Detector(opened(spec, engine), spec, min_score=0.1)
    found, turned = detector.detect([group, np.ascontiguousarray(group.transpose(1, 0, 2))])
    assert len(found) > 0
    assert len(turned) > 0


def test_a_network_that_openvino_cannot_run_is_served_by_onnxruntime(tmp_path: Path) -> None:
    model = onnx.load(color_network(tmp_path / "x.onnx"))
    model.graph.node.insert(1, helper.make_node("GlobalLpPool", ["pixels"], ["pooled"]))
    model.graph.node[2].input[0] = "pooled"
    onnx.save(model, tmp_path / "x.onnx")
    network = open_network(recognition(tmp_path / "x.onnx"), EnginePreference())
    assert network.engine == "onnxruntime"
    assert network.reason.startswith("OpenVINO cannot run this file")
    with pytest.raises(PackError, match=r"x\.onnx: cannot be opened by OpenVINO: .*GlobalLpPool"):
        opened(recognition(tmp_path / "x.onnx"), "openvino")

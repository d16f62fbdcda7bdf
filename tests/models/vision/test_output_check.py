"""Networks that the service cannot use are rejected at start with a PackError, on every engine; others are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from models.engines.selection import EnginePreference, open_network, open_on_device
from models.errors import PackError
from models.pack.manifest import LIVENESS_ALIGNMENT
from models.runtime.cuda_network import Device
from models.runtime.network import Engine, Network
from models.vision.alignment import STANDARD_ALIGNMENT, standard_alignment
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from models.vision.specs import DetectionSpec, LivenessSpec, Normalization, RecognitionSpec
from tests.networks import color_network, scrfd_network, warmth

Write = Callable[[Path], Path]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=get_args(Engine))
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.param
    return found


def recognition(path: Path) -> RecognitionSpec:
    return RecognitionSpec(path, None, Normalization(127.5, 127.5), STANDARD_ALIGNMENT, 64, "test-1")


def detection(path: Path) -> DetectionSpec:
    return DetectionSpec(path, None, Normalization(127.5, 128.0), "scrfd")


def liveness(path: Path, live_class: int | None = None) -> LivenessSpec:
    return LivenessSpec(path, None, Normalization(0, 255), LIVENESS_ALIGNMENT, live_class, 0.8, 0.3)


def opened(spec: DetectionSpec | RecognitionSpec | LivenessSpec, engine: Engine) -> Network:
    return open_network(spec, EnginePreference(engine, "fp32"))


def _over_the_batch(path: Path) -> Path:
    model = onnx.load(color_network(path))
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array([0, 2, 3], np.int64), "axes"))
    onnx.save(model, path)
    return path


UNUSABLE_RECOGNIZERS: dict[str, tuple[Write, str]] = {
    "signed bytes": (lambda p: color_network(p, dtype=TensorProto.INT8), "input of type"),
    "channels last": (lambda p: color_network(p, ["batch", 112, 112, 3], axes=(1, 2)), ", 112, 112, 3"),
    "gray": (lambda p: color_network(p, ["batch", 1, 112, 112]), ", 1, 112, 112"),
    "vectors": (lambda p: color_network(p, ["batch", 3], axes=()), "an input of"),
    "no declared input": (lambda p: color_network(p, None), "an input of"),
    "a larger crop": (
        lambda p: color_network(p, ["batch", 3, 160, 160]),
        r", 3, 160, 160\), but the pack's crops are 112x112",
    ),
    "an oblong crop": (lambda p: color_network(p, ["batch", 3, 112, 96]), r", 3, 112, 96\), but the pack's crops"),
    "two outputs": (lambda p: color_network(p, outputs=2), "exactly one output"),
    "too few numbers": (
        lambda p: color_network(p, numbers=32, declared=["batch", 32]),
        "is 64, the network returns 32",
    ),
    "undeclared length": (
        lambda p: color_network(p, numbers=32, declared=["batch", "n"]),
        "is 64, the network returns 32",
    ),
    "no numbers": (lambda p: color_network(p, numbers=0, declared=["batch", 0]), "x.onnx|returns 0"),
    "undefined numbers": (lambda p: color_network(p, factor=NAN), "finite"),
    "zeros": (lambda p: color_network(p, factor=0), "zero"),
    "one vector per batch": (_over_the_batch, r"x\.onnx|embedding_dimension"),
}


@pytest.mark.parametrize("what", UNUSABLE_RECOGNIZERS)
def test_unusable_recognizers_are_rejected(what: str, engine: Engine, tmp_path: Path) -> None:
    write, said = UNUSABLE_RECOGNIZERS[what]
    with pytest.raises(PackError, match=said):
        opened(recognition(write(tmp_path / "x.onnx")), engine)


USABLE_RECOGNIZERS: dict[str, Write] = {
    "fp16": lambda p: color_network(p, dtype=TensorProto.FLOAT16),
    "double": lambda p: color_network(p, dtype=TensorProto.DOUBLE),
    "fixed batch": lambda p: color_network(p, [4, 3, 112, 112], declared=[4, 64]),
    "open sides": lambda p: color_network(p, ["n", "channels", "height", "width"]),
    "unnamed sides": lambda p: color_network(p, [None, 3, None, None], declared=[None, None]),
    "undeclared output": lambda p: color_network(p, declared=None),
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
    assert sum(network.placement(np.zeros((1, 3, 112, 112), np.float32)).values()) > 0


def test_crops_of_another_size_are_served(engine: Engine, tmp_path: Path) -> None:
    spec = replace(
        recognition(color_network(tmp_path / "x.onnx", ["n", 3, 160, 160])), alignment=standard_alignment(160)
    )
    assert Recognizer(opened(spec, engine), spec).embed(np.full((2, 160, 160, 3), 9, np.uint8)).shape == (2, 64)


UNUSABLE_DETECTORS: dict[str, tuple[Write, str]] = {
    "no points": (lambda p: color_network(p, ["n", 3, 640, 640], outputs=6), "has 6 outputs"),
    "numbers of another kind": (lambda p: color_network(p, ["n", 3, 640, 640], outputs=9), "head needs"),
    "seven columns": (lambda p: scrfd_network(p, columns=(1, 7, 10)), "head needs"),
    "one anchor": (lambda p: scrfd_network(p, anchors=1), "head needs"),
    "oblong photos only": (lambda p: scrfd_network(p, 480, 640, grid=True), "only photos of 480x640"),
    "undefined numbers": (lambda p: scrfd_network(p, bias=NAN), "not finite"),
}


@pytest.mark.parametrize("what", UNUSABLE_DETECTORS)
def test_unusable_detectors_are_rejected(what: str, engine: Engine, tmp_path: Path) -> None:
    write, said = UNUSABLE_DETECTORS[what]
    with pytest.raises(PackError, match=said):
        opened(detection(write(tmp_path / "x.onnx")), engine)


USABLE_DETECTORS: dict[str, Write] = {
    "open": scrfd_network,
    "fp16": lambda p: scrfd_network(p, dtype=TensorProto.FLOAT16),
    "fixed square": lambda p: scrfd_network(p, 640, 640, grid=True),
    "oblong, opened": lambda p: scrfd_network(p, 480, 640),
    "fp16, opened": lambda p: scrfd_network(p, 640, 640, dtype=TensorProto.FLOAT16),
    "one fixed side, opened": lambda p: scrfd_network(p, 640, "width"),
}


@pytest.mark.parametrize("what", USABLE_DETECTORS)
def test_other_detectors_are_served(what: str, engine: Engine, tmp_path: Path, group: NDArray[np.uint8]) -> None:
    spec = detection(USABLE_DETECTORS[what](tmp_path / "x.onnx"))
    detector = Detector(opened(spec, engine), spec, min_score=0.1)
    found, turned = detector.detect([group, np.ascontiguousarray(group.transpose(1, 0, 2))])
    assert len(found) > 0
    assert len(turned) > 0


UNUSABLE_LIVENESS: dict[str, tuple[Write, str]] = {
    "a larger crop": (lambda p: warmth(p, side=128), r", 3, 128, 128\), but the pack's crops are 80x80"),
    "classes": (lambda p: warmth(p, classes=True), "live_class"),
    "logits": (lambda p: color_network(p, ["n", 3, 80, 80], 1, declared=["n", 1], factor=1e6), "outside"),
    "undefined": (lambda p: color_network(p, ["n", 3, 80, 80], 1, declared=["n", 1], factor=NAN), "not finite"),
    "two outputs": (
        lambda p: color_network(p, ["n", 3, 80, 80], 1, declared=["n", 1], outputs=2),
        "exactly one output",
    ),
}


@pytest.mark.parametrize("what", UNUSABLE_LIVENESS)
def test_unusable_liveness_networks_are_rejected(what: str, engine: Engine, tmp_path: Path) -> None:
    write, said = UNUSABLE_LIVENESS[what]
    with pytest.raises(PackError, match=said):
        opened(liveness(write(tmp_path / "x.onnx")), engine)


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

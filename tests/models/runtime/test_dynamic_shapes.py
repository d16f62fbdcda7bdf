"""Detectors of fixed shape run on batches and canvases of any size, or stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from models.engines.selection import EngineChoice, EnginePreference, available_precisions, open_with_engine
from models.pack.loading import load_pack
from models.pack.quantization import quantizing, write_int8
from models.runtime.dynamic_shapes import agrees
from models.runtime.network import Engine
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector
from models.vision.specs import DetectionSpec, Normalization

SIDE = 640


def detector(path: Path, rng: np.random.Generator, flat: bool) -> Path:
    """Write a small detector of one 640x640 photo: two levels, the second enlarged to the size of the first.
    ``flat``: outputs have no batch axis, as in InsightFace's exports.
    """
    fine, coarse = SIDE // 8, SIDE // 16
    weights = {"w8": (4, 3, 8, 8), "w16": (4, 4, 2, 2), "head": (2, 4, 1, 1)}
    constants = {name: rng.normal(size=shape, scale=0.2).astype(np.float32) for name, shape in weights.items()}
    shapes = {
        "sizes": [1, 4, fine, fine],
        "rows8": [-1, 1] if flat else [1, 2 * fine * fine, 1],
        "rows16": [-1, 1] if flat else [1, 2 * coarse * coarse, 1],
    }
    order = [2, 3, 0, 1] if flat else [0, 2, 3, 1]
    nodes = [
        helper.make_node("Conv", ["x", "w8"], ["a"], strides=[8, 8]),
        helper.make_node("Conv", ["a", "w16"], ["b"], strides=[2, 2]),
        helper.make_node("Resize", ["b", "", "", "sizes"], ["up"], mode="nearest", nearest_mode="floor"),
        helper.make_node("Add", ["a", "up"], ["sum"]),
    ]
    for level, source in (("8", "sum"), ("16", "b")):
        nodes += [
            helper.make_node("Conv", [source, "head"], [f"c{level}"]),
            helper.make_node("Transpose", [f"c{level}"], [f"t{level}"], perm=order),
            helper.make_node("Reshape", [f"t{level}", f"rows{level}"], [f"r{level}"]),
            helper.make_node("Sigmoid", [f"r{level}"], [f"score{level}"]),
        ]
    ports = [
        helper.make_tensor_value_info(
            f"score{level}", TensorProto.FLOAT, [2 * side * side, 1] if flat else [1, 2 * side * side, 1]
        )
        for level, side in (("8", fine), ("16", coarse))
    ]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, SIDE, SIDE])
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    initializers += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in shapes.items()]
    graph = helper.make_graph(nodes, "static", [image], ports, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def opened(path: Path, engine: Engine) -> OnnxNetwork:
    spec = DetectionSpec(path, None, Normalization(127.5, 128.0), "scrfd")
    return open_with_engine(spec, EngineChoice(engine, "fp32", "pinned"), EnginePreference())  # type: ignore[return-value]


@pytest.mark.parametrize("engine", get_args(Engine))
@pytest.mark.parametrize("flat", [False, True])
def test_a_fixed_detector_runs_on_other_canvases(
    engine: Engine, flat: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    if engine not in available_precisions():
        pytest.skip(f"{engine} is not installed")
    path = detector(tmp_path / "static.onnx", rng, flat)
    network = opened(path, engine)
    assert not network.is_static
    assert "fixed shape was opened" in network.reason
    photo = rng.normal(size=(1, 3, SIDE, SIDE)).astype(np.float32)
    for expected, actual in zip(OnnxNetwork(path).run(photo), network.run(photo), strict=True):
        np.testing.assert_allclose(actual.ravel(), expected.ravel(), atol=1e-4)
    small = rng.normal(size=(3, 3, 256, 384)).astype(np.float32)
    together = network.run(small)
    assert [output.shape for output in together] == [(3, 2 * 32 * 48, 1), (3, 2 * 16 * 24, 1)]
    for row in range(3):
        for output, alone in zip(together, network.run(small[row : row + 1]), strict=True):
            np.testing.assert_allclose(output[row], alone[0], atol=1e-4)


def test_an_int8_file_of_a_fixed_detector_is_dynamic(tmp_path: Path, rng: np.random.Generator) -> None:
    spec = DetectionSpec(detector(tmp_path / "static.onnx", rng, flat=True), None, Normalization(0, 1), "scrfd")
    with quantizing(spec, [rng.normal(size=(1, 3, 256, 256)).astype(np.float32)], dynamic=True) as quantizer:
        write_int8(quantizer, spec, tmp_path / "int8.onnx", quantizer.sensitive)
    assert not OnnxNetwork(tmp_path / "int8.onnx").is_static


def test_other_outputs_are_noticed(tmp_path: Path, rng: np.random.Generator) -> None:
    one, other = (OnnxNetwork(detector(tmp_path / f"{name}.onnx", rng, flat=False)) for name in "ab")
    assert not agrees(one, other)


def test_the_reference_detector_finds_the_same_faces_on_a_smaller_canvas(
    reference: Path, group: NDArray[np.uint8]
) -> None:
    spec = load_pack(reference).detection
    static = Detector(OnnxNetwork(spec.path), spec)
    dynamic = Detector(opened(spec.path, "onnxruntime"), spec)
    small = np.ascontiguousarray(group[::4, ::4])
    assert dynamic.canvas(*small.shape[:2]).width_px < static.canvas(*small.shape[:2]).width_px
    for photo in (group, small):
        ours, theirs = dynamic.detect([photo, photo]), static.detect([photo])[0]
        assert len(theirs) >= 5
        for faces in ours:
            np.testing.assert_allclose(faces.boxes_xyxy, theirs.boxes_xyxy, atol=1.0)

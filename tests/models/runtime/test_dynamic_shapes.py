"""Detectors of fixed shape run on batches and canvases of any size, or stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from models.engines.selection import EngineChoice, EnginePreference, open_with_engine
from models.pack.quantization import quantizing, write_int8
from models.runtime.dynamic_shapes import agrees
from models.runtime.network import Engine
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.specs import DetectionSpec, Normalization
from tests.networks import network

SIDE = 640


def detector(path: Path, rng: np.random.Generator, flat: bool) -> Path:
    """Write a small detector of one 640x640 photo: two levels, the second enlarged to the size of the first.
    ``flat``: outputs have no batch axis, as in InsightFace's exports.
    """
    fine, coarse = SIDE // 8, SIDE // 16
    weights = {"w8": (4, 3, 8, 8), "w16": (4, 4, 2, 2), "head": (2, 4, 1, 1)}
    constants: dict[str, NDArray[Any]] = {
        name: rng.normal(size=shape, scale=0.2).astype(np.float32) for name, shape in weights.items()
    }
    shapes = {
        "sizes": [1, 4, fine, fine],
        "rows8": [-1, 1] if flat else [1, 2 * fine * fine, 1],
        "rows16": [-1, 1] if flat else [1, 2 * coarse * coarse, 1],
    }
    order = [2, 3, 0, 1] if flat else [0, 2, 3, 1]
    nodes = [
        "a = Conv<strides = [8, 8]> (x, w8)",
        "b = Conv<strides = [2, 2]> (a, w16)",
        'up = Resize<mode = "nearest", nearest_mode = "floor"> (b, , , sizes)',
        "sum = Add (a, up)",
    ]
    for level, source in (("8", "sum"), ("16", "b")):
        nodes += [
            f"c{level} = Conv ({source}, head)",
            f"t{level} = Transpose<perm = {order}> (c{level})",
            f"r{level} = Reshape (t{level}, rows{level})",
            f"score{level} = Sigmoid (r{level})",
        ]
    ports = [
        f"float[{2 * side * side if flat else f'1, {2 * side * side}'}, 1] score{level}"
        for level, side in (("8", fine), ("16", coarse))
    ]
    constants |= {name: np.array(shape, np.int64) for name, shape in shapes.items()}
    return network(path, [f"float[1, 3, {SIDE}, {SIDE}] x"], ports, *nodes, **constants)


def opened(path: Path, engine: Engine) -> OnnxNetwork:
    spec = DetectionSpec(path, None, Normalization(127.5, 128.0), "scrfd")
    return open_with_engine(spec, EngineChoice(engine, "fp32", "pinned"), EnginePreference())  # type: ignore[return-value]


@pytest.mark.parametrize("engine", get_args(Engine))
@pytest.mark.parametrize("flat", [False, True])
def test_a_fixed_detector_runs_on_other_canvases(
    engine: Engine, flat: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = detector(tmp_path / "static.onnx", rng, flat)
    dynamic = opened(path, engine)
    assert not dynamic.is_static
    assert "fixed shape was opened" in dynamic.reason
    photo = rng.normal(size=(1, 3, SIDE, SIDE)).astype(np.float32)
    for expected, actual in zip(OnnxNetwork(path).run(photo), dynamic.run(photo), strict=True):
        np.testing.assert_allclose(actual.ravel(), expected.ravel(), atol=1e-4)
    small = rng.normal(size=(3, 3, 256, 384)).astype(np.float32)
    together = dynamic.run(small)
    assert [output.shape for output in together] == [(3, 2 * 32 * 48, 1), (3, 2 * 16 * 24, 1)]
    for row in range(3):
        for output, alone in zip(together, dynamic.run(small[row : row + 1]), strict=True):
            np.testing.assert_allclose(output[row], alone[0], atol=1e-4)


def test_an_int8_file_of_a_fixed_detector_is_dynamic(tmp_path: Path, rng: np.random.Generator) -> None:
    spec = DetectionSpec(detector(tmp_path / "static.onnx", rng, flat=True), None, Normalization(0, 1), "scrfd")
    with quantizing(spec, [rng.normal(size=(1, 3, 256, 256)).astype(np.float32)], dynamic=True) as quantizer:
        write_int8(quantizer, spec, tmp_path / "int8.onnx", quantizer.sensitive)
    assert not OnnxNetwork(tmp_path / "int8.onnx").is_static


def test_other_outputs_are_noticed(tmp_path: Path, rng: np.random.Generator) -> None:
    one, other = (OnnxNetwork(detector(tmp_path / f"{name}.onnx", rng, flat=False)) for name in "ab")
    assert not agrees(one, other)

"""ONNX by torch says what onnxruntime says, or that it cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from models.runtime import OnnxNetwork
from training.backbones import build_backbone
from training.config import BackboneConfig
from training.export import export_recogniser
from training.onnx_program import OnnxProgram, UnsupportedOperatorError


def write(path: Path, nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], shape: list[int]) -> Path:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def check(path: Path, x: np.ndarray) -> None:
    with torch.no_grad():
        mine = OnnxProgram(path)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(mine, OnnxNetwork(path).run(x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["thin_iresnet", "mobilefacenet", "iresnet18"])
def test_exported_recognisers(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    torch.manual_seed(3)
    backbone = build_backbone(BackboneConfig(name, embedding_dim=16)).eval()  # type: ignore[arg-type]
    x = rng.uniform(-1, 1, (2, 3, 112, 112)).astype(np.float32)
    export_recogniser(backbone, torch.from_numpy(x), tmp_path / "net.onnx", {}, "fp32")
    with torch.no_grad():
        mine = OnnxProgram(tmp_path / "net.onnx")(torch.from_numpy(x))
    wanted = torch.from_numpy(OnnxNetwork(tmp_path / "net.onnx").run(x)[0])
    assert torch.nn.functional.cosine_similarity(mine, wanted).min() > 0.99999


def test_the_operators_of_older_networks(tmp_path: Path, rng: np.random.Generator) -> None:
    """Pooling, padding of every axis and arithmetic, as dlib's network and early exports have them."""
    nodes = [
        helper.make_node("Sub", ["x", "mean"], ["a"]),
        helper.make_node("Mul", ["a", "factor"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[3, 3], strides=[2, 2]),
        helper.make_node("AveragePool", ["b"], ["d"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Pad", ["c", "amounts"], ["e"]),
        helper.make_node("Pad", ["d", "other"], ["f"]),
        helper.make_node("Add", ["e", "f"], ["g"]),
        helper.make_node("GlobalAveragePool", ["g"], ["h"]),
        helper.make_node("Flatten", ["h"], ["i"]),
        helper.make_node("Gemm", ["i", "weight", "bias"], ["y"], transB=1, alpha=0.5, beta=2.0),
    ]
    constants = {
        "mean": rng.normal(size=(1, 3, 1, 1)).astype(np.float32),
        "factor": np.array(1 / 256, np.float32),
        "amounts": np.array([0, 0, 0, 0, 0, 2, 1, 1]),
        "other": np.array([0, 2, 0, 0, 0, 0, 0, 0]),
        "weight": rng.normal(size=(4, 5)).astype(np.float32),
        "bias": rng.normal(size=4).astype(np.float32),
    }
    path = write(tmp_path / "net.onnx", nodes, constants, [2, 3, 10, 10])
    check(path, rng.uniform(0, 255, (2, 3, 10, 10)).astype(np.float32))


def test_what_it_does_not_know_is_said(tmp_path: Path, rng: np.random.Generator) -> None:
    unknown = write(tmp_path / "a.onnx", [helper.make_node("Softmax", ["x"], ["y"])], {}, [2, 4])
    with pytest.raises(UnsupportedOperatorError, match="Softmax"):
        OnnxProgram(unknown)
    weight = rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
    uneven = helper.make_node("Conv", ["x", "w"], ["y"], pads=[0, 0, 1, 1], strides=[2, 2])
    program = OnnxProgram(write(tmp_path / "b.onnx", [uneven], {"w": weight}, [1, 3, 8, 8]))
    with pytest.raises(UnsupportedOperatorError, match="padding"):
        program(torch.zeros(1, 3, 8, 8))

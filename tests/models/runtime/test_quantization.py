"""Quantized networks keep delicate layers in fp32, and equal the original network closely."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from models.pack.manifest import ModelPack
from models.runtime.onnx_files import restore_fp32_weights
from models.runtime.onnx_runtime import OnnxNetwork
from models.runtime.quantization import Quantizer
from tests.networks import network


def layers(path: Path) -> dict[str, bool]:
    """Return for every layer with weights whether its input is INT8."""
    graph = onnx.load(str(path)).graph
    made_by = {output: node.op_type for node in graph.node for output in node.output}
    return {
        node.name: made_by.get(node.input[1]) == "DequantizeLinear"
        for node in graph.node
        if node.op_type in ("Conv", "Gemm")
    }


@pytest.mark.parametrize("task", ["detection", "recognition"])
def test_only_sensitive_layers_stay_fp32(task: str, pack: ModelPack, tmp_path: Path) -> None:
    restore_fp32_weights(getattr(pack, task).path, tmp_path / "wide.onnx")
    shape, count = ((1, 3, 64, 96), 1) if task == "detection" else ((2, 3, 112, 112), 2)
    batches = [np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)] * count
    quantizer = Quantizer(tmp_path / "wide.onnx", batches, tmp_path, task == "recognition")
    kept = quantizer.sensitive
    quantizer.write(tmp_path / "small.onnx", kept)
    made = layers(tmp_path / "small.onnx")
    assert {name for name, small in made.items() if not small} == kept
    assert 2 <= len(kept) < len(made) / 2
    if task == "recognition":  # activations read what convolutions made
        graph = onnx.load(str(tmp_path / "small.onnx")).graph
        made_by = {output: node.op_type for node in graph.node for output in node.output}
        assert {made_by[node.input[0]] for node in graph.node if node.op_type == "LeakyRelu"} == {"Conv"}


@pytest.fixture
def old(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Network of an old opset, with three unnamed layers."""
    shapes = {"first": (8, 3, 3, 3), "second": (8, 8, 3, 3), "third": (4, 8, 1, 1)}
    return network(
        tmp_path / "old.onnx",
        ["float[n, 3, 16, 16] x"],
        ["float[n, 4, 12, 12] y"],
        "a = Conv<kernel_shape = [3, 3]> (x, first)",
        "b = Relu (a)",
        "c = Conv<kernel_shape = [3, 3]> (b, second)",
        "d = Relu (c)",
        "y = Conv<kernel_shape = [1, 1]> (d, third)",
        opset=11,
        **{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()},
    )


def test_the_middle_is_quantized_and_averaged_ranges_round_less(
    old: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = rng.normal(size=(8, 3, 16, 16)).astype(np.float32)
    (exact,) = OnnxNetwork(old).run(x)
    kept = Quantizer(old, [], tmp_path).sensitive
    errors = list[float]()
    for batches, is_recognizer in (([x], False), ([30 * x, x, x, x], False), ([30 * x, x, x, x], True)):
        folder = tmp_path / str(len(errors))
        folder.mkdir()
        Quantizer(old, batches, folder, is_recognizer).write(folder / "int8.onnx", kept)
        assert sum(layers(folder / "int8.onnx").values()) == 1  # first and last stay fp32
        errors.append(float(np.abs(OnnxNetwork(folder / "int8.onnx").run(x)[0] - exact).max() / np.abs(exact).max()))
    fitting, widest, averaged = errors  # one batch is far from the others
    assert 0 < fitting < 0.05
    assert averaged < 0.7 * widest

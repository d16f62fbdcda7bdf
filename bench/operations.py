"""Count the operations of a network, from its graph and its real tensor shapes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from models.runtime.onnx_runtime import OnnxNetwork

MULTIPLYING: Final = ("Conv", "Gemm", "MatMul")


@dataclass(frozen=True)
class Work:
    """Operations of one item of a batch: each is a multiplication and an addition. The weights are those of the file,
    for any batch size."""

    multiply_adds: int
    weights: int

    @property
    def operations(self) -> int:
        return 2 * self.multiply_adds


def work_of(path: Path, item_shape: Sequence[int]) -> Work:
    """Count convolutions and matrix products of a network for an item of this shape, (channels, height, width).
    Activations, additions and pooling are left out: their share is negligible."""
    graph = onnx.load(str(path)).graph
    products = [node for node in graph.node if node.op_type in MULTIPLYING]
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    wanted = {name for node in products for name in (*node.input[:2], node.output[0])} - shapes.keys()
    shapes |= _run(path, sorted(wanted - {value.name for value in graph.input}), item_shape)
    weights = sum(prod(tensor.dims) for tensor in graph.initializer if len(tensor.dims) > 1)
    return Work(sum(_multiply_adds(node, shapes) for node in products), weights)


def _run(path: Path, names: Sequence[str], item_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of intermediate tensors. They come from a run, because shape inference fails on some exporters'
    graphs."""
    model = onnx.load(str(path))
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    inferred = onnx.shape_inference.infer_shapes(model)
    kinds = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    for output in model.graph.output:
        output.type.tensor_type.elem_type = kinds.get(output.name, TensorProto.FLOAT)
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / path.name
        onnx.save(model, inside)
        outputs = OnnxNetwork(inside).run(np.zeros((1, *item_shape), np.float32))
    return dict(zip(names, (output.shape for output in outputs), strict=True))


def _multiply_adds(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]]) -> int:
    out, right = shapes[node.output[0]], shapes[node.input[1]]
    if node.op_type == "Conv":
        return prod(out) * prod(right[1:])
    left = shapes[node.input[0]]
    transposed = any(a.name == "transA" and a.i for a in node.attribute)
    return prod(out) * left[-2 if transposed else -1]

"""Small real ONNX networks: embeddings of the mean color, and networks of every shape that users put beside a pack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Side = int | str | None


def color_network(
    path: Path,
    image: Sequence[Side] | None = ("batch", 3, 112, 112),
    numbers: int = 64,
    *,
    declared: Sequence[Side] | None = ("batch", 64),
    outputs: int = 1,
    further_inputs: int = 0,
    dtype: int = TensorProto.FLOAT,
    axes: Sequence[int] = (2, 3),
    factor: float = 1.0,
) -> Path:
    """Write a network that multiplies the mean color of each image with a random matrix (3, ``numbers``).

    Args:
        image: declared sides of the input; None declares no shape.
        declared: declared sides of each output.
        outputs: number of equal outputs.
        further_inputs: number of further inputs, which the network ignores.
        dtype: element type of the input, the weights and the outputs. Networks of integers cast their input.
        axes: height and width of the input.
        factor: multiplied with the outputs; infinite factors give infinite and undefined outputs.
    """
    inner = dtype if dtype in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE) else TensorProto.FLOAT
    element = helper.tensor_dtype_to_np_dtype(inner)
    channels = image[1] if image and axes == (2, 3) and isinstance(image[1], int) else 3
    weights = np.random.default_rng(numbers).normal(size=(channels, numbers)) * factor
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=inner),
        helper.make_node("ReduceMean", ["pixels", "axes"], ["color"], keepdims=0, noop_with_empty_axes=1),
        *(helper.make_node("MatMul", ["color", "weights"], [f"y{number}"]) for number in range(outputs)),
    ]
    graph = helper.make_graph(
        nodes,
        "color",
        [
            helper.make_tensor_value_info("images", dtype, image),
            *(helper.make_tensor_value_info(f"x{number}", TensorProto.FLOAT, [1]) for number in range(further_inputs)),
        ],
        [helper.make_tensor_value_info(f"y{number}", inner, declared) for number in range(outputs)],
        initializer=[
            numpy_helper.from_array(np.array(axes, np.int64), "axes"),
            numpy_helper.from_array(weights.astype(element), "weights"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


def flat_network(path: Path) -> Path:
    """Write a network of 2x2 images with two equal outputs of all numbers, without a batch axis."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], [name]) for name in "ab"]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [12, 1]) for name in "ab"]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 2, 2])]
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [-1, 1])
    graph = helper.make_graph(nodes, "flat", inputs, outputs, [shape])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def scrfd_network(
    path: Path,
    height: Side = "height",
    width: Side = "width",
    *,
    dtype: int = TensorProto.FLOAT,
    anchors: int = 2,
    columns: Sequence[int] = (1, 4, 10),
    bias: float = 0.0,
    grid: bool = False,
) -> Path:
    """Write an SCRFD detector with random weights and the strides 8, 16 and 32.

    Args:
        anchors: anchors per cell; SCRFD has two.
        columns: numbers per anchor of scores, boxes and points.
        bias: added to every output.
        grid: add a constant of the canvas's size, so that no other canvas fits.
    """
    rng = np.random.default_rng(0)
    element = helper.tensor_dtype_to_np_dtype(dtype)
    nodes, outputs, constants = [], [], {"bias": np.array(bias, element)}
    for kind, numbers in zip(("score", "box", "points"), columns, strict=True):
        for stride in (8, 16, 32):
            name = f"{kind}_{stride}"
            constants[f"w_{name}"] = rng.normal(size=(anchors * numbers, 3, 1, 1), scale=0.1).astype(element)
            constants[f"s_{name}"] = np.array([0, -1, numbers], np.int64)
            nodes += [
                helper.make_node("AveragePool", ["x"], [f"p_{name}"], kernel_shape=[stride] * 2, strides=[stride] * 2),
                helper.make_node("Conv", [f"p_{name}", f"w_{name}"], [f"c_{name}"]),
            ]
            if grid and isinstance(height, int) and isinstance(width, int):
                constants[f"g_{name}"] = np.zeros((1, 1, height // stride, width // stride), element)
                nodes.append(helper.make_node("Add", [f"c_{name}", f"g_{name}"], [f"d_{name}"]))
            nodes += [
                helper.make_node("Transpose", [f"{'d' if grid else 'c'}_{name}"], [f"t_{name}"], perm=[0, 2, 3, 1]),
                helper.make_node("Reshape", [f"t_{name}", f"s_{name}"], [f"r_{name}"]),
                helper.make_node("Add", [f"r_{name}", "bias"], [name]),
            ]
            outputs.append(helper.make_tensor_value_info(name, dtype, ["batch", f"rows_{name}", numbers]))
    graph = helper.make_graph(
        nodes,
        "scrfd",
        [helper.make_tensor_value_info("x", dtype, ["batch", 3, height, width])],
        outputs,
        initializer=[numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path

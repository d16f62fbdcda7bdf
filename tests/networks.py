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
    weights = np.random.default_rng(numbers).normal(size=(3, numbers)) * factor
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=inner),
        helper.make_node("ReduceMean", ["pixels", "axes"], ["color"], keepdims=0),
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

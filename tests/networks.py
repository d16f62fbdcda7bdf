"""Small real ONNX networks: embeddings of the mean color, and networks of every shape that users put beside a pack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

Sides = Sequence[int | str | None] | None
"""Declared shape; None declares none."""


def network(
    path: Path, inputs: Sequence[str], outputs: Sequence[str], *nodes: str, opset: Any = 18, **constants: Any
) -> Path:
    """Write a network of nodes in ONNX's text form, with these constants."""
    graph = f"network ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(nodes)} }}"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {graph}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(each), name) for name, each in constants.items())
    onnx.save(model, path)
    return path


def value(name: str, sides: Sides, dtype: int = TensorProto.FLOAT) -> str:
    """Return the declaration of an input or output."""
    shape = ", ".join("?" if side is None else str(side) for side in sides or ())
    return f"{TensorProto.DataType.Name(dtype).lower()}[{shape}] {name}"


def color_network(
    path: Path,
    image: Sides = ("batch", 3, 112, 112),
    numbers: int = 64,
    *,
    declared: Sides = ("batch", 64),
    outputs: int = 1,
    further_inputs: int = 0,
    dtype: int = TensorProto.FLOAT,
    axes: Sequence[int] = (2, 3),
    factor: float = 1.0,
) -> Path:
    """Write a network that multiplies the mean color of each image with a random matrix (3, ``numbers``).

    Args:
        image: declared sides of the input.
        declared: declared sides of each output.
        outputs: number of equal outputs.
        further_inputs: number of further inputs, which the network ignores.
        dtype: element type of the input, the weights and the outputs. Networks of integers cast their input.
        axes: height and width of the input.
        factor: multiplied with the outputs; infinite factors give infinite and undefined outputs.
    """
    inner = dtype if dtype in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE) else TensorProto.FLOAT
    channels = image[1] if image and axes == (2, 3) and isinstance(image[1], int) else 3
    weights = np.random.default_rng(numbers).normal(size=(channels, numbers)) * factor
    return network(
        path,
        [value("images", image, dtype), *(value(f"x{number}", [1]) for number in range(further_inputs))],
        [value(f"y{number}", declared, inner) for number in range(outputs)],
        f"pixels = Cast<to = {inner}> (images)",
        "color = ReduceMean<keepdims = 0, noop_with_empty_axes = 1> (pixels, axes)",
        *(f"y{number} = MatMul (color, weights)" for number in range(outputs)),
        axes=np.array(axes, np.int64),
        weights=weights.astype(helper.tensor_dtype_to_np_dtype(inner)),
    )


def flat_network(path: Path) -> Path:
    """Write a network of 2x2 images with two equal outputs of all numbers, without a batch axis."""
    outputs = [value(name, [12, 1]) for name in "ab"]
    nodes = [f"{name} = Reshape (x, shape)" for name in "ab"]
    return network(path, [value("x", [1, 3, 2, 2])], outputs, *nodes, shape=[-1, 1])


def scrfd_network(
    path: Path,
    height: int | str = "height",
    width: int | str = "width",
    *,
    dtype: int = TensorProto.FLOAT,
    anchors: int = 2,
    bias: float = 0.0,
    grid: bool = False,
) -> Path:
    """Write an SCRFD detector with random weights and the strides 8, 16 and 32.

    Args:
        anchors: anchors per cell; SCRFD has two.
        bias: added to every output.
        grid: add a constant of the canvas's size, so that no other canvas fits.
    """
    rng = np.random.default_rng(0)
    element = helper.tensor_dtype_to_np_dtype(dtype)
    nodes, outputs, constants = [], [], {"bias": np.array(bias, element)}
    for kind, numbers in (("score", 1), ("box", 4), ("points", 10)):
        for stride in (8, 16, 32):
            name = f"{kind}_{stride}"
            weights = rng.normal(size=(anchors * numbers, 3, 1, 1), scale=0.1)
            fixed = (height // stride, width // stride) if isinstance(height, int) and isinstance(width, int) else ()
            constants[f"w_{name}"] = weights.astype(element)
            constants[f"s_{name}"] = np.array([0, -1, numbers], np.int64)
            constants[f"g_{name}"] = np.zeros((1, 1, *fixed) if grid else (1, 1, 1, 1), element)
            nodes += [
                f"p_{name} = AveragePool<kernel_shape = [{stride}, {stride}], strides = [{stride}, {stride}]> (x)",
                f"c_{name} = Conv (p_{name}, w_{name})",
                f"d_{name} = Add (c_{name}, g_{name})",
                f"t_{name} = Transpose<perm = [0, 2, 3, 1]> (d_{name})",
                f"r_{name} = Reshape (t_{name}, s_{name})",
                f"{name} = Add (r_{name}, bias)",
            ]
            outputs.append(value(name, ["batch", f"rows_{name}", numbers], dtype))
    return network(path, [value("x", ["batch", 3, height, width], dtype)], outputs, *nodes, **constants)


def warmth(path: Path, batch: int | str = "batch", classes: bool = False, side: int = 80) -> Path:
    """Network that classifies reddish faces as live and bluish ones as pictures. Returns (n,) probabilities, or
    logits of (picture, live).
    """
    weights = np.array([[0, 20], [0, 0], [0, -20]] if classes else [[20], [0], [-20]], np.float32)
    nodes = ["color = ReduceMean<keepdims = 0> (x, axes)", "logits = MatMul (color, weights)"]
    output = value("logits", [batch, 2])
    if not classes:
        nodes += ["both = Sigmoid (logits)", "y = Reshape (both, flat)"]
        output = value("y", [batch])
    images = [value("x", [batch, 3, side, side])]
    return network(path, images, [output], *nodes, axes=[2, 3], weights=weights, flat=[-1])

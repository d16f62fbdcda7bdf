"""Detectors exported for one photo of one size, rewritten for batches of any size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float, Network
from models.runtime.onnx_check import read_model

if TYPE_CHECKING:
    import onnx

INPUT_AXES: Final = {0: "batch", 2: "height", 3: "width"}
WEIGHTED_OPS: Final = frozenset({"Conv", "Gemm", "MatMul"})
PERMUTATIONS: Final[dict[tuple[int, ...], tuple[int, ...]]] = {(2, 3, 0, 1): (0, 2, 3, 1)}
"""Order of axes that is right for one photo only, and the same order for batches."""
TEST_SIDE_PX: Final = 256
TEST_BATCH: Final = 4
MAX_DIFFERENCE: Final = 0.01
"""Largest difference of an output, as a share of its range. bf16 rounds to 0.004; wrong rewrites change all values."""


def make_dynamic(path: Path) -> bytes | None:
    """Return the network with an open batch, height and width; None if it declares them already.

    Constant shapes of the last reshapes and constant sizes of enlargements are replaced. Networks with other constant
    shapes fail :func:`agrees`.

    Raises:
        PackError: the file cannot be read.
    """
    import onnx

    model = read_model(path)
    before = model.SerializeToString()
    graph = onnx.shape_inference.infer_shapes(model).graph
    shapes = {value.name: _dimensions(value) for value in (*graph.input, *graph.value_info)}
    del model.graph.value_info[:]
    constants = _constants(model.graph)
    initialized = {tensor.name for tensor in model.graph.initializer}
    (image,) = (value for value in model.graph.input if value.name not in initialized)
    for axis, name in INPUT_AXES.items():
        if image.type.tensor_type.shape.dim[axis].HasField("dim_value"):
            image.type.tensor_type.shape.dim[axis].dim_param = name
    last = last_tensors(model.graph)
    for node in model.graph.node:
        if node.op_type == "Reshape" and node.input[1] in constants:
            _open_reshape(model.graph, node, constants[node.input[1]].tolist(), node.output[0] in last)
        elif node.op_type == "Transpose" and node.output[0] in last:
            (order,) = (attribute for attribute in node.attribute if attribute.name == "perm")
            order.ints[:] = PERMUTATIONS.get(tuple(order.ints), order.ints)
        elif node.op_type == "Resize" and len(node.input) > 3 and node.input[3] in constants:
            _scale_resize(model.graph, node, constants[node.input[3]], shapes.get(node.input[0], []))
    for output in model.graph.output:
        columns = output.type.tensor_type.shape.dim[-1].dim_value
        output.CopyFrom(
            onnx.helper.make_tensor_value_info(
                output.name, output.type.tensor_type.elem_type, ["batch", f"rows_{output.name}", columns]
            )
        )
    after = model.SerializeToString()
    return None if after == before else after


def agrees(static: Network, dynamic: Network) -> bool:
    """Tell whether a rewritten network equals the original at its own size, and treats photos of a batch alike."""
    side_px = [side if isinstance(side, int) else 640 for side in static.input_shape[2:]]
    rng = np.random.default_rng(0)
    photo = rng.uniform(-1, 1, (1, 3, *side_px)).astype(np.float32)
    if not _alike(static.run(photo), dynamic.run(photo)):
        return False
    batch = rng.uniform(-1, 1, (TEST_BATCH, 3, TEST_SIDE_PX, TEST_SIDE_PX)).astype(np.float32)
    together, alone = dynamic.run(batch), [dynamic.run(row[None]) for row in batch]
    share = TEST_SIDE_PX**2 / np.prod(side_px)
    sizes = [output.size for output in static.run(photo)]
    return all(abs(output.size - share * size) < 1 for output, size in zip(alone[0], sizes, strict=True)) and all(
        _alike([output[row] for output in together], single) for row, single in enumerate(alone)
    )


def _alike(expected: list[Float], actual: list[Float]) -> bool:
    return len(expected) == len(actual) and all(
        a.size == b.size and np.abs(a.ravel() - b.ravel()).max() <= MAX_DIFFERENCE * max(float(np.ptp(a)), 1e-3)
        for a, b in zip(expected, actual, strict=True)
    )


def _dimensions(value: onnx.ValueInfoProto) -> list[int]:
    return [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]


def _constants(graph: onnx.GraphProto) -> dict[str, NDArray[np.int64]]:
    """Return the constant integers of a graph by name."""
    from onnx import TensorProto, numpy_helper

    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    return {
        name: numpy_helper.to_array(tensor) for name, tensor in tensors.items() if tensor.data_type == TensorProto.INT64
    }


def last_tensors(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors between the last layers with weights and the outputs."""
    found = {output.name for output in graph.output}
    for node in reversed(graph.node):
        if not found.isdisjoint(node.output) and node.op_type not in WEIGHTED_OPS:
            found.update(node.input)
    return found


def _open_reshape(graph: onnx.GraphProto, node: onnx.NodeProto, shape: list[int], is_last: bool) -> None:
    """Let a reshape keep the batch: to (batch, rows, columns) before an output, else with an open first axis."""
    if is_last and len(shape) in (2, 3):
        shape = [0, -1, shape[-1]]
    elif shape and shape[0] == 1:
        shape = [0, *shape[1:]]
    node.input[1] = _add_constant(graph, f"{node.output[0]}.shape", np.array(shape, np.int64))


def _scale_resize(graph: onnx.GraphProto, node: onnx.NodeProto, sizes: NDArray[np.int64], shape: list[int]) -> None:
    """Let an enlargement use factors instead of fixed sizes."""
    if len(shape) != len(sizes) or not all(shape):
        return
    factors = (sizes / np.array(shape)).astype(np.float32)
    node.input[2] = _add_constant(graph, f"{node.output[0]}.scales", factors)
    del node.input[3:]


def _add_constant(graph: onnx.GraphProto, name: str, values: NDArray[np.generic]) -> str:
    from onnx import numpy_helper

    graph.initializer.append(numpy_helper.from_array(values, name))
    return name

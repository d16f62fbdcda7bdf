"""Validation of untrusted ONNX files before a runtime opens them.

A valid file is self-contained, uses standard operators only, and holds weights of the declared sizes. Validation cannot
bound the memory and time of a network: a few operators can create tensors of any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from models.errors import PackError
from models.runtime.network import is_ir

if TYPE_CHECKING:
    import onnx

BUNDLED_PACKS_DIR: Final = Path(__file__).resolve().parents[1] / "packs"
"""Trusted without a check, like the code beside it."""
MAX_BYTES: Final = 2_000_000_000
"""Protobuf limits messages to 2^31 bytes."""
ALLOWED_DOMAINS: Final = ("", "ai.onnx", "ai.onnx.ml")
FORBIDDEN_OPERATORS: Final = frozenset(
    {"Loop", "ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"}
)
"""The run time of a loop has no bound, and face networks need neither files nor texts."""
MAX_NODES: Final = 50_000
MAX_TENSORS: Final = 100_000
MAX_TENSOR_ELEMENTS: Final = 2**30
MAX_PORT_ELEMENTS: Final = 2**28
"""Limit for an input or output."""
MAX_RANK: Final = 8
MAX_PORT_SIDE: Final = 2**20
MAX_OUTPUTS: Final = 256


def check_network(path: Path) -> None:
    """Validate a file. Raises PackError if it cannot be read or is not acceptable."""
    if is_bundled(path):
        return
    if is_ir(path):
        raise PackError(path.name, "is in OpenVINO's format, which only OpenVINO runs, on CPUs: choose another pack")
    check_model(read_model(path), path.name)


def is_bundled(path: Path) -> bool:
    """Tell whether a file belongs to a pack of the distribution, which its tests have checked."""
    return path.resolve().is_relative_to(BUNDLED_PACKS_DIR)


def read_model(path: Path) -> onnx.ModelProto:
    """Parse an ONNX file. Raises PackError if it is too large or invalid."""
    # Imported on demand: the bundled pack does not need its memory and start-up time.
    import onnx
    from google.protobuf.message import DecodeError

    try:
        if not path.is_file():
            raise PackError(path.name, "is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise PackError(path.name, f"has more than {MAX_BYTES} bytes")
        model = onnx.ModelProto()
        model.ParseFromString(path.read_bytes())
    except (DecodeError, OSError, ValueError) as error:
        raise PackError(path.name, f"is not an ONNX file ({error})") from error
    return model


def check_model(model: onnx.ModelProto, name: str) -> None:
    """Validate a parsed model. Raises PackError with the file's ``name`` as the field."""

    if model.functions:
        raise PackError(name, f"defines a custom operator, {model.functions[0].name!r}: inline it (onnx.inliner)")
    _check_ports(model.graph, name)
    nodes = tensors = 0
    for graph in _walk_graphs(model.graph):
        if graph.sparse_initializer:
            raise PackError(name, "holds sparse weights, which are not supported")
        nodes += len(graph.node)
        tensors += len(graph.initializer)
        if nodes > MAX_NODES or tensors > MAX_TENSORS:
            raise PackError(name, f"has more than {MAX_NODES} nodes or {MAX_TENSORS} tensors")
        for tensor in graph.initializer:
            _check_tensor(tensor, name)
        for node in graph.node:
            _check_node(node, name)


def _walk_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph and the subgraphs of its nodes. Protobuf reads at most 32 levels."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _walk_graphs(inner)


def _check_node(node: onnx.NodeProto, name: str) -> None:
    import onnx

    if node.domain not in ALLOWED_DOMAINS:
        raise PackError(
            name, f"has an operator {node.op_type!r} of {node.domain!r}: only standard operators are supported"
        )
    if node.op_type in FORBIDDEN_OPERATORS:
        raise PackError(name, f"has the forbidden operator {node.op_type}")
    if not onnx.defs.has(node.op_type, node.domain if node.domain != "ai.onnx" else ""):
        raise PackError(name, f"has an operator {node.op_type!r} that is not in the ONNX standard")
    for attribute in node.attribute:
        for tensor in ([attribute.t] if attribute.HasField("t") else []) + list(attribute.tensors):
            _check_tensor(tensor, name)
        if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
            raise PackError(name, "holds sparse weights, which are not supported")


def _check_tensor(tensor: onnx.TensorProto, name: str) -> None:
    """Reject external data, invalid types and sizes that do not match the shape."""
    import onnx

    label = f"tensor {tensor.name[:64]!r}"
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
        raise PackError(
            name,
            f"stores {label} in another file, which neither the sha256 nor the fingerprint covers: save the weights "
            "inside the model",
        )
    if tensor.data_type == onnx.TensorProto.STRING or tensor.data_type not in _element_bits():
        raise PackError(name, f"{label} has the non-numeric type {tensor.data_type}")
    is_valid = len(tensor.dims) <= MAX_RANK and min(tensor.dims, default=0) >= 0
    if not is_valid or (count := math.prod(tensor.dims)) > MAX_TENSOR_ELEMENTS:
        raise PackError(name, f"{label} has a shape of {list(tensor.dims)[:MAX_RANK]}, which exceeds the limits")
    packed = math.ceil(count * _element_bits()[tensor.data_type] / 8)
    if tensor.HasField("raw_data"):
        held, needed = len(tensor.raw_data), packed
    else:
        lists = (tensor.float_data, tensor.int32_data, tensor.int64_data, tensor.double_data, tensor.uint64_data)
        held = sum(len(values) for values in lists)
        complex_type = tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
        # Types smaller than a byte are packed.
        needed = min(count, packed) if not complex_type else 2 * count
    if held != needed:
        raise PackError(name, f"{label} has {held} bytes or numbers, its shape needs {needed}")


def _check_ports(graph: onnx.GraphProto, name: str) -> None:
    import onnx

    initialized = {tensor.name for tensor in graph.initializer}
    given = [value for value in graph.input if value.name not in initialized]
    if len(given) != 1 or not 1 <= len(graph.output) <= MAX_OUTPUTS:
        raise PackError(name, f"has {len(given)} inputs and {len(graph.output)} outputs; exactly one input is required")
    for value in (*given, *graph.output):
        kind = value.type.tensor_type
        if value.type.WhichOneof("value") != "tensor_type" or kind.elem_type == onnx.TensorProto.STRING:
            raise PackError(name, f"{value.name[:64]!r} is not a numeric tensor")
        sides = [side.dim_value for side in kind.shape.dim if side.WhichOneof("value") == "dim_value"]
        in_range = len(kind.shape.dim) <= MAX_RANK and all(0 <= side <= MAX_PORT_SIDE for side in sides)
        if not in_range or math.prod(sides) > MAX_PORT_ELEMENTS:
            raise PackError(name, f"{value.name[:64]!r} has a shape of {sides[:MAX_RANK]}, which exceeds the limits")


@lru_cache(maxsize=1)
def _element_bits() -> dict[int, int]:
    """Return the bits per element by data type."""
    from onnx import TensorProto, helper

    small = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
    return {
        number: small.get(name) or helper.tensor_dtype_to_np_dtype(number).itemsize * 8
        for name, number in TensorProto.DataType.items()
        if name not in ("UNDEFINED", "STRING")
    }

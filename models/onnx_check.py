"""What an ONNX file from a stranger may hold, looked at before any runtime opens it: a network in one file, made of the
standard's operators, whose weights are as large as they say.

What this cannot tell is whether a network is any good, or how much memory and time it will take: a few operators make a
tensor of any size from a few numbers, in more ways than can be listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from models.errors import PackError

if TYPE_CHECKING:
    import onnx

OURS: Final = Path(__file__).parent / "packs"
"""Lies among the code: who can alter it can alter this."""
MAX_BYTES: Final = 2_000_000_000
"""Protobuf's own limit is 2^31."""
MIN_IR: Final = 3
MIN_OPSET: Final = 7
"""Of the oldest that onnxruntime promises to run."""
DOMAINS: Final = ("", "ai.onnx", "ai.onnx.ml")
REFUSED: Final = {
    **dict.fromkeys(("Loop",), "how long it runs nobody can tell"),
    **dict.fromkeys(
        ("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
        "files and texts are no business of a face's network",
    ),
}
MAX_NODES: Final = 50_000
MAX_DEPTH: Final = 4
"""Of graphs in graphs."""
MAX_TENSORS: Final = 100_000
MAX_ELEMENTS: Final = 2**30
"""Of a tensor."""
MAX_GIVEN: Final = 2**28
"""Elements of an input or output."""
MAX_RANK: Final = 8
MAX_SIDE: Final = 2**20
MAX_ENDS: Final = 256
"""Inputs, and outputs."""


def check_network(path: Path) -> None:
    """Read the file and look at all of it; what a process has looked at it does not look at again.

    Raises:
        PackError: it is not what may be opened; the error says what is wrong.
    """
    path = path.resolve()
    if path.is_relative_to(OURS):
        return
    try:
        found = path.stat()
    except OSError as error:
        raise PackError(path.name, f"cannot be read ({error.strerror})") from error
    _checked(path, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=64)
def _checked(path: Path, _inode: int, _size: int, _mtime_ns: int) -> None:
    check_model(read_model(path), path.name)


def read_model(path: Path) -> onnx.ModelProto:
    """Raises PackError: it is too large, or no ONNX file."""
    # Imported here: it costs memory and time that the bundled pack need not spend.
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
    """Raises PackError, with the file's ``name``."""
    import onnx

    if not MIN_IR <= model.ir_version <= onnx.IR_VERSION:
        raise PackError(name, f"has IR version {model.ir_version}, {MIN_IR} to {onnx.IR_VERSION} are supported")
    newest = onnx.defs.onnx_opset_version()
    opset = max((each.version for each in model.opset_import if each.domain in DOMAINS[:2]), default=0)
    if not MIN_OPSET <= opset <= newest:
        raise PackError(name, f"has opset {opset}, {MIN_OPSET} to {newest} are supported")
    if model.functions:
        raise PackError(name, f"defines an operator of its own, {model.functions[0].name!r}: inline it (onnx.inliner)")
    if len(model.training_info):
        raise PackError(name, "holds a training graph: export it for inference")
    _check_ends(model.graph, name)
    nodes = tensors = 0
    for graph in _graphs(model.graph, name):
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


def _graphs(graph: onnx.GraphProto, name: str, depth: int = 1) -> Iterator[onnx.GraphProto]:
    """The graph, and those within its nodes."""
    if depth > MAX_DEPTH:
        raise PackError(name, f"has graphs in graphs, more than {MAX_DEPTH} deep")
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _graphs(inner, name, depth + 1)


def _check_node(node: onnx.NodeProto, name: str) -> None:
    import onnx

    if node.domain not in DOMAINS:
        raise PackError(name, f"has an operator {node.op_type!r} of {node.domain!r}: only the standard's are supported")
    if (reason := REFUSED.get(node.op_type)) is not None:
        raise PackError(name, f"has an operator {node.op_type}, which is refused: {reason}")
    if not onnx.defs.has(node.op_type, node.domain if node.domain != "ai.onnx" else ""):
        raise PackError(name, f"has an operator {node.op_type!r} that the standard does not know")
    for attribute in node.attribute:
        for tensor in ([attribute.t] if attribute.HasField("t") else []) + list(attribute.tensors):
            _check_tensor(tensor, name)
        if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
            raise PackError(name, "holds sparse weights, which are not supported")


def _check_tensor(tensor: onnx.TensorProto, name: str) -> None:
    """Raises PackError: its numbers are elsewhere, or are not as many as its shape says."""
    import onnx

    label = f"tensor {tensor.name[:64]!r}"
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
        raise PackError(
            name,
            f"keeps {label} in another file, of which neither its sha256 nor the fingerprint would tell: save it with "
            "its weights inside",
        )
    if tensor.data_type == onnx.TensorProto.STRING or tensor.data_type not in _bits():
        raise PackError(name, f"{label} has type {tensor.data_type}, which is no number")
    count = _elements(list(tensor.dims))
    if count is None or count > MAX_ELEMENTS:
        raise PackError(name, f"{label} claims a shape of {list(tensor.dims)[:MAX_RANK]}, more than a weight may have")
    packed = math.ceil(count * _bits()[tensor.data_type] / 8)
    if tensor.HasField("raw_data"):
        held, needed = len(tensor.raw_data), packed
    else:
        lists = (tensor.float_data, tensor.int32_data, tensor.int64_data, tensor.double_data, tensor.uint64_data)
        held = sum(len(values) for values in lists)
        complex_type = tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
        # Numbers of less than a byte are packed, several in one.
        needed = min(count, packed) if not complex_type else 2 * count
    if held != needed:
        raise PackError(name, f"{label} has {held} bytes or numbers, its shape says {needed}")


def _check_ends(graph: onnx.GraphProto, name: str) -> None:
    import onnx

    initialised = {tensor.name for tensor in graph.initializer}
    given = [value for value in graph.input if value.name not in initialised]
    if len(given) != 1 or not 1 <= len(graph.output) <= MAX_ENDS:
        raise PackError(name, f"has {len(given)} inputs and {len(graph.output)} outputs: one photo goes in")
    for value in (*given, *graph.output):
        kind = value.type.tensor_type
        if value.type.WhichOneof("value") != "tensor_type" or kind.elem_type == onnx.TensorProto.STRING:
            raise PackError(name, f"{value.name[:64]!r} is no tensor of numbers")
        sides = [side.dim_value for side in kind.shape.dim if side.WhichOneof("value") == "dim_value"]
        if len(kind.shape.dim) > MAX_RANK or not all(0 <= side <= MAX_SIDE for side in sides):
            raise PackError(name, f"{value.name[:64]!r} has a shape of {sides[:MAX_RANK]}")
        if math.prod(sides) > MAX_GIVEN:
            raise PackError(name, f"{value.name[:64]!r} has a shape of {sides[:MAX_RANK]}")


def _elements(sides: list[int]) -> int | None:
    """None: it is no shape."""
    return None if len(sides) > MAX_RANK or any(side < 0 for side in sides) else math.prod(sides)


@lru_cache(maxsize=1)
def _bits() -> dict[int, int]:
    """Of one element, by the type's number."""
    from onnx import TensorProto, helper

    small = {
        name: bits
        for name, bits in (("UINT4", 4), ("INT4", 4), ("FLOAT4E2M1", 4), ("UINT2", 2), ("INT2", 2))
        if hasattr(TensorProto, name)
    }
    known = {
        number: helper.tensor_dtype_to_np_dtype(number).itemsize * 8
        for name, number in TensorProto.DataType.items()
        if name not in ("UNDEFINED", "STRING")
    }
    return known | {TensorProto.DataType.Value(name): bits for name, bits in small.items()}

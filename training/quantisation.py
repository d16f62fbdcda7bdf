"""Static INT8 by onnxruntime's quantiser."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from models.network import Float

MULTIPLYING = frozenset({"Conv", "Gemm", "MatMul"})
JOINED = ("Add", "MaxPool", "Relu", "Resize")
"""They take part, or a runtime goes back to fp32 between two layers. What decodes a detector's boxes must not."""


class _Batches(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str, batches: Iterable[Float]) -> None:
        self._name = name
        self._batches: Iterator[Float] = iter(batches)

    def get_next(self) -> dict[str, Float] | None:
        batch = next(self._batches, None)
        return None if batch is None else {self._name: batch}


def quantise(source: Path, target: Path, batches: Iterable[Float], kept: Collection[str] = ()) -> None:
    """Write ``source`` with 8-bit weights (per channel) and activations, as QDQ.

    Args:
        batches: what it will be fed; they set the activations' ranges.
        kept: names of nodes that stay as they are.
    """
    # The quantiser speaks through the root logger at every call.
    before = logging.root.level
    logging.root.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            prepared = Path(folder) / "prepared.onnx"
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            quantize_static(
                str(prepared),
                str(target),
                _Batches(onnx.load(str(prepared)).graph.input[0].name, batches),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                op_types_to_quantize=[*sorted(MULTIPLYING), *JOINED],
                nodes_to_exclude=sorted(kept),
            )
    finally:
        logging.root.setLevel(before)


def delicate(network: Path) -> frozenset[str]:
    """Names of the layers whose rounding costs most and which have little to compute: those before which, or after
    which, nothing has weights, and those of a head that several levels share, whose noise no later layer averages."""
    graph = onnx.load(str(network)).graph
    layers = [node for node in graph.node if node.op_type in MULTIPLYING]
    from_input, to_output = {graph.input[0].name}, {output.name for output in graph.output}
    for node in graph.node:
        if node.op_type not in MULTIPLYING and not from_input.isdisjoint(node.input):
            from_input.update(node.output)
    for node in reversed(graph.node):
        if node.op_type not in MULTIPLYING and not to_output.isdisjoint(node.output):
            to_output.update(node.input)
    uses = Counter(node.input[1] for node in layers)
    return frozenset(
        node.name
        for node in layers
        if node.input[0] in from_input or not to_output.isdisjoint(node.output) or uses[node.input[1]] > 1
    )

"""Static INT8 quantization with onnxruntime."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from models.runtime.network import Float

WEIGHTED_OPS = frozenset({"Conv", "Gemm", "MatMul"})
INT8_PASSTHROUGH_OPS = ("Add", "MaxPool", "Relu", "Resize")
"""Quantized too, since runtimes otherwise return to fp32 between layers. Ops that decode boxes must stay fp32."""


class _CalibrationBatches(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str, batches: Iterable[Float]) -> None:
        self._name = name
        self._batches: Iterator[Float] = iter(batches)

    def get_next(self) -> dict[str, Float] | None:
        batch = next(self._batches, None)
        return None if batch is None else {self._name: batch}


def quantize(source: Path, target: Path, batches: Iterable[Float], excluded: Collection[str] = ()) -> None:
    """Write ``source`` with 8-bit weights (per channel) and activations, as QDQ.

    Args:
        batches: representative inputs, which set the ranges of activations.
        excluded: names of nodes that stay fp32.
    """
    # The quantizer logs to the root logger at every call.
    before = logging.root.level
    logging.root.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            prepared = Path(folder) / "prepared.onnx"
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            quantize_static(
                str(prepared),
                str(target),
                _CalibrationBatches(onnx.load(str(prepared)).graph.input[0].name, batches),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                op_types_to_quantize=[*sorted(WEIGHTED_OPS), *INT8_PASSTHROUGH_OPS],
                nodes_to_exclude=sorted(excluded),
            )
    finally:
        logging.root.setLevel(before)


def sensitive_layers(network: Path) -> frozenset[str]:
    """Return the names of layers that lose most by rounding and cost little to compute.

    These are the first and the last layers with weights, and those of a head shared by several levels.
    """
    graph = onnx.load(str(network)).graph
    layers = [node for node in graph.node if node.op_type in WEIGHTED_OPS]
    from_input, to_output = {graph.input[0].name}, {output.name for output in graph.output}
    for node in graph.node:
        if node.op_type not in WEIGHTED_OPS and not from_input.isdisjoint(node.input):
            from_input.update(node.output)
    for node in reversed(graph.node):
        if node.op_type not in WEIGHTED_OPS and not to_output.isdisjoint(node.output):
            to_output.update(node.input)
    uses = Counter(node.input[1] for node in layers)
    return frozenset(
        node.name
        for node in layers
        if node.input[0] in from_input or not to_output.isdisjoint(node.output) or uses[node.input[1]] > 1
    )

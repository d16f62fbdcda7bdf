"""Static INT8 quantization with onnxruntime."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import onnx
import onnx.version_converter
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from models.runtime.dynamic_shapes import WEIGHTED_OPS, last_tensors
from models.runtime.network import Float

END_LAYERS: Final = 4
"""Layers at each end of a recognizer that stay fp32: what they round goes through all others, or into the embedding."""
AVERAGING: Final = 0.1
"""Weight of a batch in the mean of ranges."""
MIN_OPSET: Final = 13
"""Oldest opset with scales per channel."""
INT8_PASSTHROUGH_OPS: Final = ("Add", "MaxPool", "Relu", "Resize")
"""Quantized too, since runtimes otherwise return to fp32 between layers. Ops that decode boxes must stay fp32."""


class _CalibrationBatches(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str, batches: Iterable[Float]) -> None:
        self._name = name
        self._batches: Iterator[Float] = iter(batches)

    def get_next(self) -> dict[str, Float] | None:
        batch = next(self._batches, None)
        return None if batch is None else {self._name: batch}


class Quantizer:
    """Static quantization of one network, whose ranges of activations are measured once for all choices of layers.

    Args:
        source: network with fp32 weights.
        batches: representative inputs, which set the ranges. They are read by the first :meth:`write`.
        folder: work folder.
        is_recognizer: take the mean of the batches' ranges, which rounds less and cuts rare values off, instead of the
            widest range, and count END_LAYERS at both ends as sensitive.

    Attributes:
        folder: work folder.
        layers: names of the layers with weights.
        sensitive: names of the layers that lose most by rounding and cost little to compute: the first and the last
            layers with weights, and those of a head shared by several levels.
    """

    def __init__(self, source: Path, batches: Iterable[Float], folder: Path, is_recognizer: bool = False) -> None:
        self.folder = folder
        self._is_recognizer = is_recognizer
        self._prepared = folder / "prepared.onnx"
        self._ranges = folder / "ranges.json"
        model = onnx.load(str(source))
        for number, node in enumerate(model.graph.node):
            node.name = node.name or f"node_{number}"  # layers are chosen by name
        if max(each.version for each in model.opset_import if each.domain in ("", "ai.onnx")) < MIN_OPSET:
            model = onnx.version_converter.convert_version(model, MIN_OPSET)
        named = folder / "named.onnx"
        onnx.save(model, str(named))
        with _quiet():
            quant_pre_process(str(named), str(self._prepared), skip_symbolic_shape=True)
        prepared = onnx.load(str(self._prepared)).graph
        self._batches = _CalibrationBatches(prepared.input[0].name, batches)
        self.layers = tuple(node.name for node in prepared.node if node.op_type in WEIGHTED_OPS)
        # The preparation gives each use of shared weights its own copy.
        self.sensitive = _sensitive_layers(model.graph) & frozenset(self.layers)
        if is_recognizer:
            self.sensitive |= {*self.layers[:END_LAYERS], *self.layers[-END_LAYERS:]}

    def write(self, target: Path, excluded: Collection[str]) -> None:
        """Write the network with 8-bit weights (per channel) and activations, as QDQ.

        Args:
            excluded: names of layers that stay fp32.
        """
        with _quiet():
            quantize_static(
                str(self._prepared),
                str(target),
                self._batches,
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                op_types_to_quantize=[*sorted(WEIGHTED_OPS), *INT8_PASSTHROUGH_OPS],
                nodes_to_exclude=sorted(excluded),
                calibration_cache_path=self._ranges,
                extra_options={
                    "CalibMovingAverage": self._is_recognizer,
                    "CalibMovingAverageConstant": AVERAGING,
                    # An activation after a layer then reads exact values, and runtimes join the two: OpenVINO halves
                    # the time of MobileFaceNet.
                    "OpTypesToExcludeOutputQuantization": sorted(WEIGHTED_OPS),
                },
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the quantizer, which logs to the root logger at every call."""
    before = logging.root.level
    logging.root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.root.setLevel(before)


def _sensitive_layers(graph: onnx.GraphProto) -> frozenset[str]:
    layers = [node for node in graph.node if node.op_type in WEIGHTED_OPS]
    from_input, to_output = {graph.input[0].name}, last_tensors(graph)
    for node in graph.node:
        if node.op_type not in WEIGHTED_OPS and not from_input.isdisjoint(node.input):
            from_input.update(node.output)
    uses = Counter(node.input[1] for node in layers)
    return frozenset(
        node.name
        for node in layers
        if node.input[0] in from_input or not to_output.isdisjoint(node.output) or uses[node.input[1]] > 1
    )

"""Published network, cut between its blocks."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray

from models.errors import ModelError
from models.runtime import openvino_network
from models.runtime.network import Network
from models.runtime.onnx_runtime import OnnxNetwork
from models.runtime.openvino_network import OpenVinoNetwork
from models.vision.pixels import to_planes
from models.vision.specs import RecognitionSpec

Float = NDArray[np.floating]
BATCH: Final = 32


class Teacher:
    """Teacher of a `BottleneckNet`, in parts: stem, bottlenecks, head.

    Args:
        spec: recognizer of a pack.

    Raises:
        ModelError: the network does not have such parts.
    """

    def __init__(self, spec: RecognitionSpec) -> None:
        self.alignment, self._normalization = spec.alignment, spec.normalization
        model = onnx.load(spec.path)
        cuts = [model.graph.input[0].name, *find_cuts(model), model.graph.output[0].name]
        extractor = onnx.utils.Extractor(onnx.shape_inference.infer_shapes(model, data_prop=True))

        def extract(first: str, *last: str) -> bytes:
            return bytes(extractor.extract_model([first], list(last)).SerializeToString())

        self._parts = [
            OnnxNetwork(spec.path, "CPUExecutionProvider", graph=extract(before, after))
            for before, after in itertools.pairwise(cuts)
        ]
        fast = openvino_network.is_installed() and "bf16" in openvino_network.fast_precisions()
        whole = extract(*cuts)
        self._whole: Network = (
            OpenVinoNetwork(spec.path, "bf16", graph=whole)
            if fast
            else OnnxNetwork(spec.path, "CPUExecutionProvider", graph=whole)
        )

    def maps(self, views: NDArray[np.uint8]) -> list[Float]:
        """Return the map after each part, of (B, side, side, 3) RGB views; the last is the (B, D) embedding."""
        maps = self._whole.run(self.prepare(views))
        return [*maps[:-1], maps[-1].reshape(len(views), -1)]

    def prepare(self, views: NDArray[np.uint8]) -> Float:
        """Return (B, 3, side, side) input of the first part, of (B, side, side, 3) RGB views."""
        return to_planes(views, self._normalization, np.empty((len(views), 3, *views.shape[1:3]), np.float32))

    def advance(self, part: int, maps: Float) -> Float:
        """Return the maps after a part, of the maps before it."""
        return self._parts[part].run(maps.astype(np.float32))[0]


def find_cuts(model: onnx.ModelProto) -> list[str]:
    """Return the names of the maps after the stem and after each bottleneck.

    A bottleneck ends with the product of its squeeze-excitation, or with the sum of that product and its input.
    """
    producers = {name: node for node in model.graph.node for name in node.output}
    consumers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    cuts: list[str] = []
    for node in model.graph.node:
        if node.op_type == "Mul" and any(n in producers and producers[n].op_type == "Sigmoid" for n in node.input):
            end = node.output[0]
            after = consumers[end]
            cuts.append(after[0].output[0] if after[0].op_type == "Add" and len(after) == 1 else end)
    activations = [node for node in model.graph.node if node.op_type in ("PRelu", "LeakyRelu")]
    if len(activations) < 2 or not cuts:
        raise ModelError("the teacher has no bottlenecks with squeeze-excitation")
    return [activations[1].output[0], *cuts]

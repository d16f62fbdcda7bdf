"""Published network, cut between its blocks."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Final

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.errors import ModelError
from models.runtime import openvino_network
from models.runtime.network import Network
from models.runtime.onnx_runtime import OnnxNetwork
from models.runtime.openvino_network import OpenVinoNetwork
from models.vision.pixels import to_planes
from models.vision.specs import RecognitionSpec
from training.imitation.graph import GraphNetwork

Float = NDArray[np.floating]
BATCH: Final = 32


class Teacher:
    """Teacher of a `BottleneckNet`, in parts: stem, bottlenecks, head.

    Args:
        spec: recognizer of a pack.

    Raises:
        ModelError: the network does not have such parts.
    """

    device = torch.device("cpu")
    """Device of the maps that `maps` returns."""

    def __init__(self, spec: RecognitionSpec) -> None:
        self.alignment, self.normalization = spec.alignment, spec.normalization
        self._path, self._model = spec.path, onnx.load(spec.path)
        self.cuts = [self._model.graph.input[0].name, *find_cuts(self._model), self._model.graph.output[0].name]

    @cached_property
    def _extractor(self) -> onnx.utils.Extractor:
        return onnx.utils.Extractor(onnx.shape_inference.infer_shapes(self._model, data_prop=True))

    def _extract(self, first: str, *last: str) -> bytes:
        return bytes(self._extractor.extract_model([first], list(last)).SerializeToString())

    @cached_property
    def _parts(self) -> list[Network]:
        pairs = itertools.pairwise(self.cuts)
        return [OnnxNetwork(self._path, "CPUExecutionProvider", graph=self._extract(*pair)) for pair in pairs]

    @cached_property
    def _whole(self) -> Network:
        graph = self._extract(*self.cuts)
        if openvino_network.is_installed() and "bf16" in openvino_network.fast_precisions():
            return OpenVinoNetwork(self._path, "bf16", graph=graph)
        return OnnxNetwork(self._path, "CPUExecutionProvider", graph=graph)

    @torch.no_grad()
    def maps(self, views: Tensor) -> list[Tensor]:
        """Return the map after each part, of (B, side, side, 3) uint8 RGB views; the last is the (B, D) embedding."""
        maps = self.run(views)
        return [*maps[:-1], maps[-1].flatten(1)]

    def run(self, views: Tensor) -> list[Tensor]:
        """Return the network's own map after each part."""
        return [torch.from_numpy(values) for values in self._whole.run(self.prepare(views.numpy()))]

    def prepare(self, views: NDArray[np.uint8]) -> Float:
        """Return (B, 3, side, side) input of the first part, of (B, side, side, 3) RGB views."""
        return to_planes(views, self.normalization, np.empty((len(views), 3, *views.shape[1:3]), np.float32))

    def advance(self, part: int, maps: Float) -> Float:
        """Return the maps after a part, of the maps before it."""
        return self._parts[part].run(maps.astype(np.float32))[0]


class TorchTeacher(Teacher):
    """Teacher that computes its maps on a GPU.

    Args:
        precision: half precision rounds a map eight times less than bf16 does, and the published weights are in it.
    """

    def __init__(self, spec: RecognitionSpec, device: torch.device, precision: torch.dtype = torch.float16) -> None:
        super().__init__(spec)
        self.device, self._precision = device, precision
        network = GraphNetwork(self._model, self.cuts[1:]).to(device, precision)
        self._compute = torch.compile(network) if device.type == "cuda" else network

    def run(self, views: Tensor) -> list[Tensor]:
        planes = views.to(self.device, non_blocking=True).permute(0, 3, 1, 2).to(self._precision)
        planes = planes.flip(1) if self.normalization.color == "BGR" else planes
        maps: list[Tensor] = self._compute((planes - self.normalization.mean) / self.normalization.std)
        return maps


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

"""Published network, cut between its blocks, on the CPU or as a torch module on the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

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
    """Teacher of a `BottleneckNet`, in parts: stem, bottlenecks, head. Raises
    ModelError: the network does not have such parts."""

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
    """Teacher that computes its maps on a GPU, in half precision: it rounds a map eight times less than bf16 does, and
    the published weights are in it."""

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
    """Return the names of the maps after the stem and after each bottleneck. A bottleneck ends with the product of its
    squeeze-excitation, or with the sum of that product and its input."""
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


REMEDY: Final = "Set CUDA_VISIBLE_DEVICES to an empty value, so that the CPU computes the teacher"


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    pads = options.get("pads", [0, 0, 0, 0])
    if pads[:2] != pads[2:] or options.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise ModelError(f"The teacher pads the sides of a map differently. {REMEDY}")
    strides, dilations = options.get("strides", [1, 1]), options.get("dilations", [1, 1])
    return F.conv2d(x, weight, bias, strides, pads[:2], dilations, options.get("group", 1))


def _mean(x: Tensor, axes: Tensor | list[int], keepdims: int = 1, **_: Any) -> Tensor:
    return x.mean(axes.tolist() if isinstance(axes, Tensor) else axes, keepdim=bool(keepdims))


def _reshape(x: Tensor, shape: Tensor, **_: Any) -> Tensor:
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape.tolist())])


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    for axis in sorted(axes.tolist()):
        x = x.unsqueeze(axis)
    return x


OPERATORS: Final = MappingProxyType[str, Callable[..., Tensor]](
    {
        "Add": lambda x, y: x + y,
        "Sub": lambda x, y: x - y,
        "Mul": lambda x, y: x * y,
        "Div": lambda x, y: x / y,
        "Conv": _convolve,
        "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
        "PRelu": lambda x, slope: torch.where(x < 0, slope * x, x),
        "Sigmoid": torch.sigmoid,
        "GlobalAveragePool": lambda x: x.mean((2, 3), keepdim=True),
        "ReduceMean": _mean,
        "Flatten": lambda x, axis=1: x.flatten(axis),
        "Reshape": _reshape,
        "Unsqueeze": _unsqueeze,
    }
)
"""Functions of inputs and attributes, by ONNX's names."""


class GraphNetwork(nn.Module):
    """Network of an ONNX graph with one input and without branches on values. Raises ModelError: the graph has another
    operator, or at its first run, uneven padding.

    Args:
        model: graph of `OPERATORS` alone.
        outputs: names of the values that ``forward`` returns.
    """

    def __init__(self, model: onnx.ModelProto, outputs: Sequence[str]) -> None:
        super().__init__()
        unknown = sorted({node.op_type for node in model.graph.node} - {*OPERATORS, "Constant"})
        if unknown:
            raise ModelError(
                f"The teacher has operators that torch does not compute here: {', '.join(unknown)}. {REMEDY}"
            )
        self._outputs, self._input = tuple(outputs), model.graph.input[0].name
        self._names: dict[str, str] = {}
        constants = [(tensor.name, tensor) for tensor in model.graph.initializer]
        constants += [
            (n.output[0], onnx.helper.get_node_attr_value(n, "value")) for n in model.graph.node if not n.input
        ]
        for number, (name, tensor) in enumerate(constants):
            self._names[name] = f"constant_{number}"
            self.register_buffer(self._names[name], torch.from_numpy(numpy_helper.to_array(tensor).copy()))
        self._steps = [
            (
                OPERATORS[node.op_type],
                [*node.input],
                {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute},
                node.output[0],
            )
            for node in model.graph.node
            if node.input
        ]

    def forward(self, x: Tensor) -> list[Tensor]:
        values = {name: self.get_buffer(buffer) for name, buffer in self._names.items()}
        values[self._input] = x
        for function, inputs, attributes, output in self._steps:
            values[output] = function(*(values[name] for name in inputs), **attributes)
        return [values[name] for name in self._outputs]

"""Converter from OpenVINO IR, version 10 or 11, to ONNX, for plain convolutional networks and without OpenVINO.

An IR is an XML file with layers, their settings and edges between their ports, and a file with the weights. The layers
are operators of opset1 (OpenVINO documentation, "Operation Specifications").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from models.errors import ModelError

MAX_XML_BYTES: Final = 10_000_000
MAX_NUMBER_DIGITS: Final = 12
ELEMENT_TYPES: Final[Mapping[str, np.dtype[np.floating[Any]]]] = {"f16": np.dtype("<f2"), "f32": np.dtype("<f4")}
OPSET: Final = 17
IR_VERSION: Final = 8
"""Version of the ONNX file format."""

Float = NDArray[np.float32]


class OpenVinoFormatError(ModelError):
    """Network that is damaged, or has a layer that Kith does not convert."""


@dataclass(frozen=True)
class Layer:
    """Layer of the XML.

    ``inputs``: ids of the layers before it, by port. ``shape``: shape of its first input, empty if that is unknown.
    """

    id: str
    kind: str
    settings: Mapping[str, str]
    inputs: tuple[str, ...]
    shape: tuple[int, ...]

    def numbers(self, name: str) -> list[int]:
        """Return a setting such as "1, 1". Raises OpenVinoFormatError."""
        try:
            return [_natural_number(part) for part in self.settings.get(name, "").split(",")]
        except ValueError as error:
            raise OpenVinoFormatError(f"{self} has no valid {name}") from error

    def __str__(self) -> str:
        return f"layer {self.id} ({self.kind})"


def to_onnx(xml: bytes, weights: bytes) -> onnx.ModelProto:
    """Convert a network with one image as input and one vector as output.

    The result maps ``input`` (batch, channels, height, width) float32 to ``embedding`` (batch, D), in any batch size.

    Raises:
        OpenVinoFormatError: the files are damaged, or Kith does not convert a layer.
    """
    graph = _GraphBuilder(weights)
    for layer in _read_layers(xml):
        graph.add(layer)
    return graph.finish()


def _natural_number(text: str) -> int:
    """Return the number that a text states. Raises ValueError."""
    if len(text) > MAX_NUMBER_DIGITS or (number := int(text)) < 0:
        raise ValueError(text)
    return number


def _read_layers(xml: bytes) -> list[Layer]:
    """Return the layers, each after its inputs."""
    # Without a document type, XML cannot define entities that expand without end. UTF-16 would hide it.
    if b"<!" in xml or b"\0" in xml or len(xml) > MAX_XML_BYTES:
        raise OpenVinoFormatError(f"the XML has a document type or comment, or more than {MAX_XML_BYTES:,} bytes")
    try:
        root = ElementTree.fromstring(xml)  # noqa: S314 - see above
        if root.tag != "net" or root.get("version") not in ("10", "11"):
            raise OpenVinoFormatError("the XML is no network of OpenVINO IR, version 10 or 11")
        inputs: dict[str, dict[int, str]] = {}
        for edge in root.iterfind("edges/edge"):
            port = _natural_number(edge.get("to-port", ""))
            inputs.setdefault(edge.get("to-layer", ""), {})[port] = edge.get("from-layer", "")
        layers = {}
        for found in root.iterfind("layers/layer"):
            key, data, first = found.get("id", ""), found.find("data"), found.find("input/port")
            layers[key] = Layer(
                key,
                found.get("type", ""),
                {} if data is None else dict(data.attrib),
                tuple(before for _, before in sorted(inputs.get(key, {}).items())),
                () if first is None else tuple(_natural_number(dim.text or "") for dim in first.iterfind("dim")),
            )
        return [layers[key] for key in TopologicalSorter({k: layers[k].inputs for k in layers}).static_order()]
    except (ElementTree.ParseError, LookupError, ValueError, CycleError) as error:
        raise OpenVinoFormatError(f"the XML cannot be read, or its edges fit no layers ({error})") from error


class _GraphBuilder:
    """ONNX graph that grows by one layer at a time."""

    def __init__(self, weights: bytes) -> None:
        self._weights = weights
        self._constants: dict[str, Float] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._values: dict[str, str] = {}
        """Names in the ONNX graph of the layers' results."""
        self._input: list[int] | None = None
        self._finished = False

    def add(self, layer: Layer) -> None:
        convert = _CONVERTERS.get(layer.kind)
        if convert is None:
            raise OpenVinoFormatError(f"{layer}: Kith does not convert layers of this kind")
        count, method = convert
        if len(layer.inputs) != count:
            raise OpenVinoFormatError(f"{layer} has {len(layer.inputs)} inputs, not {count}")
        if not self._values.keys() >= set(layer.inputs):
            raise OpenVinoFormatError(f"{layer} follows the network's output")
        method(self, layer)

    def finish(self) -> onnx.ModelProto:
        if self._input is None or not self._finished:
            raise OpenVinoFormatError("the network has no input or no output")
        used = {name for node in self._nodes for name in node.input}
        _, channels, *sides = self._input
        model = helper.make_model(
            helper.make_graph(
                self._nodes,
                "openvino",
                [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", channels, *sides])],
                [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", "dimension"])],
                [numpy_helper.from_array(value, name) for name, value in self._constants.items() if name in used],
            ),
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
        )
        try:
            inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
            onnx.checker.check_model(model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise OpenVinoFormatError(f"the layers do not fit each other ({error})") from error
        model.graph.output[0].CopyFrom(inferred.graph.output[0])
        return model

    def parameter(self, layer: Layer) -> None:
        shape = layer.numbers("shape")
        if self._input is not None or len(shape) != 4 or min(shape) < 1:
            raise OpenVinoFormatError(f"{layer} is no single image")
        self._input = shape
        self._values[layer.id] = "input"

    def constant(self, layer: Layer) -> None:
        kind = ELEMENT_TYPES.get(layer.settings.get("element_type", ""))
        if kind is None:
            raise OpenVinoFormatError(f"{layer} has numbers other than f16 and f32")
        shape = layer.numbers("shape") if layer.settings.get("shape") else []
        (offset,), (size,) = layer.numbers("offset"), layer.numbers("size")
        if size != math.prod(shape) * kind.itemsize or offset + size > len(self._weights):
            raise OpenVinoFormatError(f"{layer} does not fit the file of weights: is the download incomplete?")
        stored = np.frombuffer(self._weights, kind, math.prod(shape), offset).reshape(shape)
        if not np.isfinite(stored).all():
            raise OpenVinoFormatError(f"{layer} has weights that are not finite")
        self._values[layer.id] = f"constant_{layer.id}"
        self._constants[self._values[layer.id]] = stored.astype(np.float32)

    def conversion(self, layer: Layer) -> None:
        self._weights_of(layer, 0)
        if layer.settings.get("destination_type") != "f32":
            raise OpenVinoFormatError(f"{layer} does not convert weights to f32")
        self._values[layer.id] = self._values[layer.inputs[0]]

    def convolution(self, layer: Layer) -> None:
        groups = 1
        kernel = self._weights_of(layer, 1, 5 if layer.kind == "GroupConvolution" else 4)
        if kernel.ndim == 5:
            groups, outputs, *rest = kernel.shape
            kernel = kernel.reshape(groups * outputs, *rest)
        if layer.settings.get("auto_pad", "explicit") != "explicit" or layer.numbers("dilations") != [1, 1]:
            raise OpenVinoFormatError(f"{layer} has automatic padding or dilations")
        self._compute(
            layer,
            "Conv",
            self._replace_constant(layer, kernel),
            strides=layer.numbers("strides"),
            pads=layer.numbers("pads_begin") + layer.numbers("pads_end"),
            group=groups,
        )

    def prelu(self, layer: Layer) -> None:
        slope = self._weights_of(layer, 1)
        if slope.size == 1:  # ONNX Runtime fuses LeakyRelu, with any slope, into the convolution before it
            self._compute(layer, "LeakyRelu", alpha=float(slope.item()))
        else:
            self._compute(layer, "PRelu", self._replace_constant(layer, slope.reshape(-1, 1, 1)))

    def average(self, layer: Layer) -> None:
        kernel = layer.numbers("kernel")
        if tuple(kernel) != layer.shape[2:] or any(layer.numbers("pads_begin") + layer.numbers("pads_end")):
            raise OpenVinoFormatError(f"{layer} is no average of a whole map")
        self._compute(layer, "GlobalAveragePool")

    def elementwise(self, layer: Layer) -> None:
        self._compute(layer, "Mul" if layer.kind == "Multiply" else layer.kind)

    def result(self, layer: Layer) -> None:
        if self._finished:
            raise OpenVinoFormatError("the network has more than one output")
        self._finished = True
        self._nodes.append(helper.make_node("Flatten", [self._values[layer.inputs[0]]], ["embedding"], "embedding"))

    def _compute(self, layer: Layer, operator: str, second: str | None = None, **attributes: Any) -> None:
        names = [self._values[before] for before in layer.inputs]
        if operator == "LeakyRelu":
            names = names[:1]
        elif second is not None:
            names[1] = second
        self._values[layer.id] = f"{operator}_{layer.id}"
        self._nodes.append(
            helper.make_node(operator, names, [self._values[layer.id]], self._values[layer.id], **attributes)
        )

    def _weights_of(self, layer: Layer, port: int, dimensions: int | None = None) -> Float:
        weights = self._constants.get(self._values[layer.inputs[port]])
        if weights is None or (dimensions is not None and weights.ndim != dimensions):
            raise OpenVinoFormatError(f"{layer} has no weights, or weights of another shape")
        return weights

    def _replace_constant(self, layer: Layer, value: Float) -> str:
        name = f"weights_{layer.id}"
        self._constants[name] = value
        return name


_CONVERTERS: Final[Mapping[str, tuple[int, Callable[[_GraphBuilder, Layer], None]]]] = {
    "Parameter": (0, _GraphBuilder.parameter),
    "Const": (0, _GraphBuilder.constant),
    "Convert": (1, _GraphBuilder.conversion),
    "Convolution": (2, _GraphBuilder.convolution),
    "GroupConvolution": (2, _GraphBuilder.convolution),
    "PReLU": (2, _GraphBuilder.prelu),
    "AvgPool": (1, _GraphBuilder.average),
    "Add": (2, _GraphBuilder.elementwise),
    "Multiply": (2, _GraphBuilder.elementwise),
    "Sigmoid": (1, _GraphBuilder.elementwise),
    "Result": (1, _GraphBuilder.result),
}
"""Number of inputs, and method, of each kind of layer."""

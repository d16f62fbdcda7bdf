"""Converter from dlib's face network (``dlib_face_recognition_resnet_model_v1.dat``) to ONNX, without dlib.

The file has dlib's serialization format: integers as a length byte and little-endian bytes, floats as mantissa and
binary exponent, tensors as four dimensions and raw float32. It lists the layers from the input on, with settings and
weights, but not their connections. Those follow dlib's source, a ResNet with 29 convolutions (D. King, dlib 19.3,
``dnn_face_recognition_ex.cpp``).
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from models.errors import ModelError

SIDE_PX: Final = 150
DIMENSION: Final = 128
FIRST_LAYER: Final = "input_rgb_image_sized"
SIGN_BIT: Final = 0x80
LENGTH_BITS: Final = 0x0F
MAX_FLOAT: Final = float(np.finfo(np.float32).max)
OPSET: Final = 17
IR_VERSION: Final = 8

Float = NDArray[np.float32]


class DlibFormatError(ModelError):
    """File that is another network or damaged."""


@dataclass(frozen=True)
class Layer:
    """Stored layer.

    ``sizes``: (filters, height, width, stride y, stride x, padding y, padding x) of a convolution, the same without
    filters of a pooling. ``weights``: flat, in file order.
    """

    kind: str
    sizes: tuple[int, ...] = ()
    weights: Float | None = None


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def skip_to(self, text: str) -> None:
        wanted = bytes([1, len(text)]) + text.encode("ascii")
        self._at = self._content.find(wanted)
        if self._at < 0:
            raise DlibFormatError(f"{text} is missing: this is not dlib's face recognition network")

    def integer(self) -> int:
        head = self._bytes(1)[0]
        value = int.from_bytes(self._bytes(head & LENGTH_BITS), "little")
        return -value if head & SIGN_BIT else value

    def integers(self, count: int) -> tuple[int, ...]:
        return tuple(self.integer() for _ in range(count))

    def text(self) -> str:
        return self._bytes(self.integer()).decode("ascii", "replace")

    def number(self) -> float:
        mantissa, exponent = self.integers(2)
        with suppress(OverflowError):  # dlib writes infinity with an exponent out of range
            if abs(value := math.ldexp(mantissa, exponent)) <= MAX_FLOAT:
                return value
        raise DlibFormatError(f"the number before byte {self._at} is not finite in float32")

    def skip_flags(self, count: int) -> None:
        flags = self._bytes(count)
        if flags.strip(b"01"):
            raise DlibFormatError(f"{flags!r} before byte {self._at} are no flags")

    def tensor(self) -> Float:
        _version, *shape = self.integers(5)
        return np.frombuffer(self._bytes(4 * math.prod(shape)), "<f4").astype(np.float32)

    def _bytes(self, count: int) -> bytes:
        piece = self._content[self._at : self._at + count]
        if len(piece) != count:
            raise DlibFormatError(
                f"the file ends at byte {len(self._content)}, within a layer: the download is incomplete"
            )
        self._at += count
        return piece


def read_layers(content: bytes) -> tuple[Float, list[Layer]]:
    """Return the mean RGB color (3,) that the network subtracts, and its layers in order.

    Raises:
        DlibFormatError: the file is another network or damaged.
    """
    reader = _Reader(content)
    reader.skip_to(FIRST_LAYER)
    reader.text()
    mean = np.array([reader.number() for _ in range(3)], np.float32)
    if (size := reader.integers(2)) != (SIDE_PX, SIDE_PX):
        raise DlibFormatError(f"the input has {size[0]}x{size[1]} pixels, not {SIDE_PX}x{SIDE_PX}")
    layers = [_read_layer(reader)]
    while layers[-1].kind != "fc":
        reader.skip_flags(3)
        if len(layers) == 1:
            reader.integer()  # samples per input
        for _ in range(3):
            reader.tensor()  # gradients and outputs of a training step, empty after training
        layers.append(_read_layer(reader))
    return mean, layers


def _read_layer(reader: _Reader) -> Layer:
    match name := reader.text():
        case "con_4":
            weights = reader.tensor()
            sizes = reader.integers(7)
            reader.integers(10)  # offsets of filters and biases in the weights
            for _ in range(4):
                reader.number()  # learning rates and weight decays
            return Layer("con", sizes, weights)
        case "affine_":
            weights = reader.tensor()
            reader.integers(11)  # positions of factors and offsets; per-channel flag
            return Layer("affine", (), weights)
        case "max_pool_2" | "avg_pool_2":
            return Layer(name[:8], reader.integers(6))
        case "relu_" | "add_prev_":
            return Layer(name.rstrip("_"))
        case "fc_2":
            sizes = reader.integers(2)
            return Layer("fc", sizes, reader.tensor())
    raise DlibFormatError(f"{name[:40]!r} is not a layer of dlib's face recognition network")


def to_onnx(content: bytes) -> onnx.ModelProto:
    """Convert a serialized network to ONNX.

    The result maps ``input`` (batch, 3, 150, 150) float32 RGB in 0..255 to ``embedding`` (batch, 128), not normalized.

    Raises:
        DlibFormatError: the file is another network or damaged.
    """
    mean, layers = read_layers(content)
    net = _GraphBuilder(layers)
    value = net.affine(net.convolution(net.normalize_input(mean)))
    value = net.pool(net.relu(value), "max_pool", "MaxPool")
    while net.next_is("con"):
        shortcut = value
        value = net.affine(net.convolution(net.relu(net.affine(net.convolution(value)))))
        if net.next_is("avg_pool"):
            shortcut = net.pool(shortcut, "avg_pool", "AveragePool")
        value = net.relu(net.add(value, shortcut))
    return net.finish(value)


@dataclass(frozen=True)
class _Value:
    """Intermediate tensor (batch, channels, side, side)."""

    name: str
    channels: int
    side: int


class _GraphBuilder:
    """Builds an ONNX graph by consuming the layers in order."""

    def __init__(self, layers: list[Layer]) -> None:
        self._layers, self._taken = layers, 0
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []

    def next_is(self, kind: str) -> bool:
        # The final global pooling has height 0 and is not part of a block.
        layer = self._layers[self._taken]
        return layer.kind == kind and (kind != "avg_pool" or layer.sizes[0] > 0)

    def normalize_input(self, mean: Float) -> _Value:
        # InsightFace recognizes by these two names that a network normalizes its own input.
        centered = self._add("Sub", ["input", self._constant(mean.reshape(1, 3, 1, 1))], "Sub")
        return _Value(self._add("Mul", [centered, self._constant(np.float32(1 / 256))], "Mul"), 3, SIDE_PX)

    def convolution(self, value: _Value) -> _Value:
        weights, (filters, height, width, stride, _, pad, _) = self._weights("con"), self._sizes(-1)
        split = filters * value.channels * height * width
        if min(filters, height, width, stride) <= 0 or pad < 0 or len(weights) != split + filters:
            raise DlibFormatError(f"a convolution with {filters} filters has {len(weights)} weights")
        kernel = self._constant(weights[:split].reshape(filters, value.channels, height, width))
        name = self._add(
            "Conv", [value.name, kernel, self._constant(weights[split:])], strides=[stride] * 2, pads=[pad] * 4
        )
        return _Value(name, filters, (value.side + 2 * pad - height) // stride + 1)

    def affine(self, value: _Value) -> _Value:
        weights = self._weights("affine")
        if len(weights) != 2 * value.channels:
            raise DlibFormatError(f"{len(weights)} factors and offsets do not fit {value.channels} channels")
        factors, offsets = weights.reshape(2, 1, value.channels, 1, 1)
        scaled = self._add("Mul", [value.name, self._constant(factors)])
        return replace(value, name=self._add("Add", [scaled, self._constant(offsets)]))

    def relu(self, value: _Value) -> _Value:
        self._take("relu")
        return replace(value, name=self._add("Relu", [value.name]))

    def pool(self, value: _Value, kind: str, operator: str) -> _Value:
        height, width, stride, *_ = self._take(kind).sizes
        if not (0 < height <= value.side and 0 < width <= value.side and stride > 0):
            raise DlibFormatError(f"a pooling of {height}x{width} pixels does not fit a side of {value.side}")
        name = self._add(operator, [value.name], kernel_shape=[height, width], strides=[stride] * 2)
        return replace(value, name=name, side=(value.side - height) // stride + 1)

    def add(self, one: _Value, other: _Value) -> _Value:
        """Add two tensors as dlib does: missing channels, rows and columns count as zeros."""
        self._take("add_prev")
        channels, side = max(one.channels, other.channels), max(one.side, other.side)
        names = [self._pad(value, channels, side) for value in (one, other)]
        return _Value(self._add("Add", names), channels, side)

    def finish(self, value: _Value) -> onnx.ModelProto:
        self._take("avg_pool")
        pooled = self._add("GlobalAveragePool", [value.name])
        weights = self._weights("fc")
        if len(weights) != value.channels * DIMENSION:
            raise DlibFormatError(f"the last layer does not map {value.channels} channels to {DIMENSION} numbers")
        matrix = self._constant(weights.reshape(value.channels, DIMENSION))
        self._add("MatMul", [self._add("Flatten", [pooled]), matrix], "embedding")
        graph = helper.make_graph(
            self._nodes,
            "dlib_face_recognition_resnet_model_v1",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, SIDE_PX, SIDE_PX])],
            [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", DIMENSION])],
            self._constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        onnx.checker.check_model(model, full_check=True)
        return model

    def _take(self, kind: str) -> Layer:
        layer = self._layers[self._taken]
        if layer.kind != kind:
            raise DlibFormatError(f"layer {self._taken + 1} is {layer.kind}, not {kind}: this is another network")
        self._taken += 1
        return layer

    def _sizes(self, offset: int) -> tuple[int, ...]:
        return self._layers[self._taken + offset].sizes

    def _weights(self, kind: str) -> Float:
        weights = self._take(kind).weights
        assert weights is not None  # noqa: S101  # _read_layer sets weights for these kinds
        return weights

    def _pad(self, value: _Value, channels: int, side: int) -> str:
        missing = [0, channels - value.channels, side - value.side, side - value.side]
        if not any(missing):
            return value.name
        return self._add("Pad", [value.name, self._constant(np.array([0, 0, 0, 0, *missing], np.int64))])

    def _constant(self, values: NDArray[np.generic] | np.generic) -> str:
        name = f"constant_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def _add(self, operator: str, inputs: list[str], name: str = "", **attributes: Any) -> str:
        name = name or f"{operator}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

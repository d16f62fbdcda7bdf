"""An ONNX network run by torch: on the accelerator where the training is, and in bfloat16 where that is native.

A few dozen lines for the operators of plain convolutional recognisers; anything else is left to onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

Attributes = Mapping[str, Any]


class UnsupportedOperatorError(ValueError):
    """The network has an operator, or a variant of one, that is not among these."""


class OnnxProgram(nn.Module):
    """A network of one input and one output, in evaluation mode.

    Raises:
        UnsupportedOperatorError: onnxruntime has to run it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        graph = onnx.load(str(path)).graph
        self._nodes = [
            (
                node.op_type,
                list(node.input),
                node.output[0],
                {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
            )
            for node in graph.node
        ]
        unknown = sorted({kind for kind, *_ in self._nodes} - set(OPERATORS))
        constants = {tensor.name for tensor in graph.initializer}
        inputs = [value.name for value in graph.input if value.name not in constants]
        if unknown or len(inputs) != 1 or len(graph.output) != 1:
            raise UnsupportedOperatorError(f"{path.name}: {', '.join(unknown) or 'more than one input or output'}")
        self._input, self._output = inputs[0], graph.output[0].name
        self._constants = {tensor.name: f"constant_{i}" for i, tensor in enumerate(graph.initializer)}
        for tensor in graph.initializer:
            values = torch.from_numpy(numpy_helper.to_array(tensor).copy())
            four = values.ndim == 4  # kernels, which channels-last convolutions want so
            self.register_buffer(
                self._constants[tensor.name], values.contiguous(memory_format=torch.channels_last) if four else values
            )

    def forward(self, x: Tensor) -> Tensor:
        values = {name: getattr(self, buffer) for name, buffer in self._constants.items()}
        values[self._input] = x.contiguous(memory_format=torch.channels_last)
        for kind, inputs, output, attributes in self._nodes:
            values[output] = OPERATORS[kind]([values[name] for name in inputs if name], attributes)
        result: Tensor = values[self._output]
        return result


def _convolution(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    x, weight, *bias = inputs
    return F.conv2d(
        x,
        weight,
        bias[0] if bias else None,
        attributes.get("strides", [1, 1]),
        _even_padding(attributes),
        attributes.get("dilations", [1, 1]),
        attributes.get("group", 1),
    )


def _even_padding(attributes: Attributes) -> list[int]:
    top, left, bottom, right = attributes.get("pads", [0, 0, 0, 0])
    if (top, left) != (bottom, right) or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise UnsupportedOperatorError("padding that differs from side to side")
    return [top, left]


def _batch_norm(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    x, weight, bias, mean, variance = inputs
    return F.batch_norm(x, mean, variance, weight, bias, eps=attributes.get("epsilon", 1e-5))


def _pad(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    x, amounts = inputs[0], inputs[1].tolist()
    if attributes.get("mode", b"constant") != b"constant" or len(inputs) > 2:
        raise UnsupportedOperatorError("padding other than by zeros")
    before, after = amounts[: x.ndim], amounts[x.ndim :]
    return F.pad(x, [amount for pair in zip(reversed(before), reversed(after), strict=True) for amount in pair])


def _reshape(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    x, shape = inputs[0], inputs[1].tolist()
    if not attributes.get("allowzero", 0):  # a zero then means: as it was
        shape = [size or x.shape[axis] for axis, size in enumerate(shape)]
    return x.reshape(shape)


def _prelu(inputs: list[Tensor], _: Attributes) -> Tensor:
    return F.prelu(inputs[0], inputs[1].flatten())


def _gemm(inputs: list[Tensor], attributes: Attributes) -> Tensor:
    a, b, *c = inputs
    a, b = (x.T if attributes.get(name, 0) else x for x, name in ((a, "transA"), (b, "transB")))
    product: Tensor = attributes.get("alpha", 1.0) * (a @ b)
    return product + attributes.get("beta", 1.0) * c[0] if c else product


OPERATORS: Mapping[str, Callable[[list[Tensor], Attributes], Tensor]] = MappingProxyType(
    {
        "Add": lambda inputs, _: inputs[0] + inputs[1],
        "AveragePool": lambda inputs, a: F.avg_pool2d(inputs[0], a["kernel_shape"], a["strides"], _even_padding(a)),
        "BatchNormalization": _batch_norm,
        "Conv": _convolution,
        "Flatten": lambda inputs, a: inputs[0].flatten(a.get("axis", 1)),
        "Gemm": _gemm,
        "GlobalAveragePool": lambda inputs, _: inputs[0].mean((2, 3), keepdim=True),
        "MatMul": lambda inputs, _: inputs[0] @ inputs[1],
        "MaxPool": lambda inputs, a: F.max_pool2d(inputs[0], a["kernel_shape"], a["strides"], _even_padding(a)),
        "Mul": lambda inputs, _: inputs[0] * inputs[1],
        "PRelu": _prelu,
        "Pad": _pad,
        "Reshape": _reshape,
        "Relu": lambda inputs, _: F.relu(inputs[0]),
        "Sub": lambda inputs, _: inputs[0] - inputs[1],
    }
)

"""Published ONNX network as a torch module, so that a teacher computes on the GPU beside its student."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from models.errors import ModelError

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
    """Network of an ONNX graph with one input and without branches on values.

    Args:
        model: graph of `OPERATORS` alone.
        outputs: names of the values that ``forward`` returns.

    Raises:
        ModelError: the graph has another operator, or at its first run, uneven padding.
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

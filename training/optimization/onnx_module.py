"""Convolutional ONNX networks as torch modules, so that a teacher runs on the student's device and shows its maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from training.config import ConfigError

Attributes = Mapping[str, Any]
Node = tuple[str, list[str], str, dict[str, Any]]
"""Operator, names of inputs, name of the output, attributes."""


def _conv(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    top, left, bottom, right = attributes.get("pads", (0, 0, 0, 0))
    padding = (top, left)
    if (top, left) != (bottom, right):
        x, padding = F.pad(x, (left, right, top, bottom)), (0, 0)
    return F.conv2d(x, weight, bias, attributes.get("strides", (1, 1)), padding)


def _pad(attributes: Attributes, x: Tensor, pads: Tensor) -> Tensor:
    counts = [int(n) for n in pads.tolist()]
    half = len(counts) // 2
    return F.pad(x, [n for pair in reversed([*zip(counts[:half], counts[half:], strict=True)]) for n in pair])


OPERATORS: Final[Mapping[str, Callable[..., Tensor]]] = MappingProxyType(
    {
        "Add": lambda attributes, a, b: a + b,
        "Sub": lambda attributes, a, b: a - b,
        "Mul": lambda attributes, a, b: a * b,
        "MatMul": lambda attributes, a, b: a @ b,
        "Relu": lambda attributes, x: F.relu(x),
        "Flatten": lambda attributes, x: x.flatten(1),
        "GlobalAveragePool": lambda attributes, x: x.mean((2, 3), keepdim=True),
        "MaxPool": lambda attributes, x: F.max_pool2d(x, attributes["kernel_shape"], attributes["strides"]),
        "AveragePool": lambda attributes, x: F.avg_pool2d(x, attributes["kernel_shape"], attributes["strides"]),
        "Conv": _conv,
        "Pad": _pad,
    }
)
"""Operators of dlib's network, without the options that it does not use."""


def is_convolutional(path: Path) -> bool:
    """Tell whether `OnnxModule` can run a network."""
    return not {node.op_type for node in onnx.load(str(path), load_external_data=False).graph.node} - OPERATORS.keys()


class OnnxModule(nn.Module):
    """ONNX network as a torch module. Raises ConfigError if it has other operators than `OPERATORS`.

    ``block_maps`` names the input of the first residual block and the output of each block. State dicts have no
    weights: the file has them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        graph = onnx.load(str(path)).graph
        unknown = {node.op_type for node in graph.node} - OPERATORS.keys()
        if unknown:
            raise ConfigError(f"{path.name}: torch cannot run {', '.join(sorted(unknown))} of this network")
        self._input, self._output = graph.input[0].name, graph.output[0].name
        nodes = [
            (
                node.op_type,
                list(node.input),
                node.output[0],
                {a.name: helper.get_attribute_value(a) for a in node.attribute},
            )
            for node in graph.node
        ]
        constants = {tensor.name: torch.tensor(numpy_helper.to_array(tensor)) for tensor in graph.initializer}
        self._nodes = _fold_affine(nodes, constants)
        self._slots = {name: f"constant_{i}" for i, name in enumerate(constants)}
        for name, value in constants.items():
            self.register_buffer(self._slots[name], value, persistent=False)
        self.block_maps = self._find_blocks()

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output and the maps of ``block_maps``."""
        values = {name: getattr(self, slot) for name, slot in self._slots.items()} | {self._input: x}
        for operator, inputs, output, attributes in self._nodes:
            values[output] = OPERATORS[operator](attributes, *(values[name] for name in inputs))
        return values[self._output], [values[name] for name in self.block_maps]

    def _find_blocks(self) -> Sequence[str]:
        """Return the maps of a residual network: a block ends in the ReLU of a sum of two computed maps."""
        makers = {output: (operator, inputs) for operator, inputs, output, _ in self._nodes}
        used = [name for _, inputs, _, _ in self._nodes for name in inputs]
        names: list[str] = []
        for operator, inputs, output, _ in self._nodes:
            maker, summands = makers.get(inputs[0], ("", []))
            if operator == "Relu" and maker == "Add" and not set(summands) & self._slots.keys():
                names += [output] if names else [*(name for name in summands if used.count(name) > 1), output]
        return names


def _fold_affine(nodes: Sequence[Node], constants: dict[str, Tensor]) -> list[Node]:
    """Merge scale and shift per channel into the convolution with bias before them, which saves memory traffic."""
    folded: list[Node] = []
    for operator, inputs, output, attributes in nodes:
        maker = folded[-1] if folded else None
        follows = maker is not None and maker[0] == "Conv" and len(maker[1]) == 3 and maker[2] == inputs[0]
        if maker is None or not follows or operator not in ("Mul", "Add") or inputs[1] not in constants:
            folded.append((operator, inputs, output, attributes))
            continue
        weight, bias, value_C = maker[1][1], maker[1][2], constants.pop(inputs[1]).flatten()
        if operator == "Mul":
            constants[weight] = constants[weight] * value_C[:, None, None, None]
            constants[bias] = constants[bias] * value_C
        else:
            constants[bias] = constants[bias] + value_C
        folded[-1] = (*maker[:2], output, maker[3])
    return folded

"""Liveness network of two MiniFASNets, converted from their authors' files of weights to one ONNX file.

Minivision, Silent-Face-Anti-Spoofing (Apache-2.0): MiniFASNetV2 sees 2.7 face sizes, MiniFASNetV1SE 4. Both see 80x80
pixels, BGR in 0..255; class 1 is a live face, and the score is the mean of its two probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from models.checksums import sha256_of
from models.pack.manifest import MANIFEST_FILE
from models.pack.openvino_ir import IR_VERSION, OPSET
from models.pack.torch_file import TorchFileError, read_tensors

NAME: Final = "minifasnet"
SIDE_PX: Final = 80
FACE_SIZES: Final = (2.7, 4.0)
"""Sides of the two crops, in sides of the face's box."""
LIVE_CLASS: Final = 1
THRESHOLD: Final = 0.5
BATCH_NORM_EPSILON: Final = 1e-5
STAGES: Final = (("conv_23", "conv_3"), ("conv_34", "conv_4"), ("conv_45", "conv_5"))
"""Block that halves the map, and the residual blocks after it."""

Weights = Mapping[str, NDArray[Any]]


def to_onnx(contents: Sequence[bytes]) -> onnx.ModelProto:
    """Convert the files of weights, in the order of `FACE_SIZES`.

    The result maps ``input`` (batch, 3, 80, 160), the crops side by side, to ``score`` (batch, 1) in [0, 1].

    Raises:
        TorchFileError: a file is damaged, or holds another network.
    """
    graph = _GraphBuilder()
    graph.add("Split", ["input"], [f"crop_{number}" for number in range(len(contents))], axis=3)
    probabilities = [graph.add_network(content, f"crop_{number}") for number, content in enumerate(contents)]
    graph.add("Mean", probabilities, ["mean"])
    graph.add("Gather", ["mean", graph.store(np.array([LIVE_CLASS]))], ["score"], axis=1)
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            NAME,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, SIDE_PX, SIDE_PX * len(contents)])],
            [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch", 1])],
            graph.constants,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise TorchFileError(f"the weights are not those of a MiniFASNet ({error})") from error
    return model


def write_minifasnet(directory: Path, files: Sequence[Path]) -> None:
    """Write the network and a manifest with its liveness task into a directory. Raises TorchFileError as `to_onnx`."""
    path = directory / "liveness.onnx"
    onnx.save(to_onnx([file.read_bytes() for file in files]), str(path))
    task = {
        "file": path.name,
        "sha256": sha256_of(path),
        "preprocessing": {"mean": 0.0, "std": 1.0},
        "color": "BGR",
        "input_size": [SIDE_PX * len(FACE_SIZES), SIDE_PX],
        "face_sizes": list(FACE_SIZES),
        "threshold": THRESHOLD,
    }
    document = {
        "model_id": NAME,
        "tasks": {"liveness": task},
        "provenance": {"liveness": [{"file": file.name, "sha256": sha256_of(file)} for file in files]},
    }
    (directory / MANIFEST_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


class _GraphBuilder:
    """ONNX graph that grows by one network at a time."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._weights: Weights = {}

    def add(self, operator: str, inputs: Sequence[str], outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node, and return the name of its first output."""
        named = list(outputs) or [f"{operator}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(operator, list(inputs), named, f"node_{len(self.nodes)}", **attributes))
        return named[0]

    def store(self, value: NDArray[Any]) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def add_network(self, content: bytes, crop: str) -> str:
        """Add a network, and return the name of its probabilities."""
        tensors = read_tensors(content)
        self._weights = {name.removeprefix("module."): value for name, value in tensors.items()}
        x = self._activate(self._convolve(crop, "conv1", stride=2, padding=1), "conv1")
        x = self._activate(self._convolve(x, "conv2_dw", padding=1), "conv2_dw")
        for halving, blocks in STAGES:
            x = self._bottleneck(x, halving, stride=2)
            number = 0
            while f"{blocks}.model.{number}.conv.conv.weight" in self._weights:
                x = self._residual(x, f"{blocks}.model.{number}")
                number += 1
        x = self._activate(self._convolve(x, "conv_6_sep"), "conv_6_sep")
        x = self.add("Flatten", [self._convolve(x, "conv_6_dw")])
        scale, shift = self._batch_norm("bn")
        first = self._of("linear.weight") * scale[:, None]
        x = self.add("Gemm", [x, self.store(first), self.store(shift)], transB=1)
        x = self.add("Gemm", [x, self.store(self._of("prob.weight"))], transB=1)
        return self.add("Softmax", [x], axis=1)

    def _residual(self, x: str, name: str) -> str:
        out = self._bottleneck(x, name)
        if f"{name}.se_module.fc1.weight" in self._weights:
            pooled = self.add("GlobalAveragePool", [out])
            pooled = self.add("Relu", [self._convolve(pooled, f"{name}.se_module", "fc1", "bn1")])
            weight = self.add("Sigmoid", [self._convolve(pooled, f"{name}.se_module", "fc2", "bn2")])
            out = self.add("Mul", [out, weight])
        return self.add("Add", [x, out])

    def _bottleneck(self, x: str, name: str, stride: int = 1) -> str:
        x = self._activate(self._convolve(x, f"{name}.conv"), f"{name}.conv")
        x = self._activate(self._convolve(x, f"{name}.conv_dw", stride=stride, padding=1), f"{name}.conv_dw")
        return self._convolve(x, f"{name}.project")

    def _convolve(
        self, x: str, name: str, kernel: str = "conv", norm: str = "bn", stride: int = 1, padding: int = 0
    ) -> str:
        """Add a convolution with the batch norm after it. A kernel with one input channel is depthwise."""
        weights = self._of(f"{name}.{kernel}.weight")
        scale, shift = self._batch_norm(f"{name}.{norm}")
        if weights.ndim != 4 or len(weights) != len(scale):
            raise TorchFileError(f"{name} is not a convolution of a MiniFASNet")
        return self.add(
            "Conv",
            [x, self.store(weights * scale[:, None, None, None]), self.store(shift)],
            strides=[stride, stride],
            pads=[padding] * 4,
            group=len(weights) if weights.shape[1] == 1 else 1,
        )

    def _activate(self, x: str, name: str) -> str:
        return self.add("PRelu", [x, self.store(self._of(f"{name}.prelu.weight").reshape(-1, 1, 1))])

    def _batch_norm(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return factors and summands of the channels."""
        gain, shift, mean, variance = (
            self._of(f"{name}.{part}") for part in ("weight", "bias", "running_mean", "running_var")
        )
        scale = gain / np.sqrt(variance + np.float32(BATCH_NORM_EPSILON))
        return scale, shift - mean * scale

    def _of(self, name: str) -> NDArray[np.float32]:
        value = self._weights.get(name)
        if value is None or value.dtype != np.float32 or not np.isfinite(value).all():
            raise TorchFileError(f"the file of weights has no finite {name}")
        return value

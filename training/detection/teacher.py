"""YuNet as the teacher of a detector, cut between its blocks."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.errors import ModelError
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.pixels import to_planes
from models.vision.specs import DetectionSpec
from training.detection.network import COLUMNS, STRIDES, Outputs

KINDS: Final = ("cls", "obj", "bbox", "kps")
PART_ENDS: Final = (1, 3, 5, 7, 9, 11)
"""Activations after stem and blocks, among all activations."""


class DetectorTeacher:
    """YuNet's maps after stem and blocks, and its outputs before the sigmoid. Raises ModelError: the network is not a
    YuNet.

    Args:
        spec: detector of a pack.
        photos_BHWC: RGB photos by which each channel of a map is scaled to a variance of one: small channels would
            not be learned otherwise.
    """

    def __init__(self, spec: DetectionSpec, photos_BHWC: NDArray[np.uint8]) -> None:
        self._normalization = spec.normalization
        model = onnx.load(spec.path)
        maps, outputs = find_maps(model), find_outputs(model)
        extractor = onnx.utils.Extractor(onnx.shape_inference.infer_shapes(model))

        def extract(*names: str) -> OnnxNetwork:
            graph = extractor.extract_model([model.graph.input[0].name], list(names)).SerializeToString()
            return OnnxNetwork(spec.path, "CPUExecutionProvider", graph=graph)

        self._whole = extract(*maps, *outputs)
        self._up_to = [extract(name) for name in maps]
        self._scales = [torch.ones(1) for _ in PART_ENDS]
        found, _ = self.run(photos_BHWC)
        self._scales = [1 / y.std((0, 2, 3), keepdim=True).clamp(min=1e-6) for y in found]

    def run(self, photos_BHWC: NDArray[np.uint8]) -> tuple[list[Tensor], Outputs]:
        """Return scaled maps and outputs of (B, H, W, 3) RGB photos, sides multiples of 32."""
        found = [torch.from_numpy(values) for values in self._whole.run(self._prepare(photos_BHWC))]
        maps, outputs = found[: len(PART_ENDS)], found[len(PART_ENDS) :]
        columns = len(COLUMNS)
        return (
            [y * scale for y, scale in zip(maps, self._scales, strict=True)],
            [outputs[columns * level : columns * (level + 1)] for level in range(len(STRIDES))],
        )

    def map_after(self, part: int, photos_BHWC: NDArray[np.uint8]) -> Tensor:
        """Return the scaled map after one part."""
        (values,) = self._up_to[part].run(self._prepare(photos_BHWC))
        return torch.from_numpy(values) * self._scales[part]

    def _prepare(self, photos_BHWC: NDArray[np.uint8]) -> NDArray[np.float32]:
        batch, height, width, _ = photos_BHWC.shape
        return to_planes(photos_BHWC, self._normalization, np.empty((batch, 3, height, width), np.float32))


def find_maps(model: onnx.ModelProto) -> list[str]:
    """Return the names of the maps after stem and blocks."""
    activations = [node.output[0] for node in model.graph.node if node.op_type == "Relu"]
    if len(activations) <= PART_ENDS[-1]:
        raise ModelError("the teacher is not a YuNet: it has too few activations")
    return [activations[end] for end in PART_ENDS]


def find_outputs(model: onnx.ModelProto) -> list[str]:
    """Return the names of the last convolution of each output, stride by stride."""
    producers = {name: node for node in model.graph.node for name in node.output}
    names = [f"{kind}_{stride}" for stride in STRIDES for kind in KINDS]
    if missing := set(names) - {output.name for output in model.graph.output}:
        raise ModelError(f"the teacher is not a YuNet: it has no output {min(missing)}")

    def convolution(name: str) -> str:
        node = producers[name]
        return name if node.op_type == "Conv" else convolution(node.input[0])

    return [convolution(name) for name in names]

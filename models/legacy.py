"""Directories of ONNX files without a manifest: InsightFace packs of old, OpenCV Zoo's YuNet and SFace.

Routing follows InsightFace: files in sorted order, the kind told by outputs and input shape, the first of a kind wins;
a recogniser whose first nodes subtract and multiply normalises by itself.
"""

from __future__ import annotations

from pathlib import Path

from models.alignment import standard
from models.errors import PackError
from models.onnx_check import read_model
from models.pack import DetectionSpec, ModelPack, Normalisation, RecognitionSpec

SCRFD_OUTPUTS = (6, 9, 10, 15)
YUNET_OUTPUTS = 12
FIRST_NODES = 8


def route_directory(directory: Path) -> ModelPack:
    """Find one detector and one recogniser among ``directory/*.onnx``.

    Raises:
        PackError: either is missing, or a file is not ONNX.
    """
    detection: DetectionSpec | None = None
    recognition: RecognitionSpec | None = None
    for path in sorted(directory.glob("*.onnx")):
        spec = _classify(path)
        if isinstance(spec, DetectionSpec):
            detection = detection or spec
        elif isinstance(spec, RecognitionSpec):
            recognition = recognition or spec
    if detection is None:
        raise PackError("tasks.detection", f"no SCRFD or YuNet detector with five points among {directory.name}/*.onnx")
    if recognition is None:
        raise PackError("tasks.recognition", f"no 112x112 recogniser among {directory.name}/*.onnx")
    return ModelPack(directory, directory.name, directory.name, detection, recognition)


def _classify(path: Path) -> DetectionSpec | RecognitionSpec | None:
    graph = read_model(path).graph
    initialised = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in initialised]
    if not inputs:
        return None
    height, width = ([d.dim_value for d in inputs[0].type.tensor_type.shape.dim] + [0, 0, 0, 0])[2:4]
    outputs = len(graph.output)
    if outputs == YUNET_OUTPUTS and any(o.name.startswith("kps") for o in graph.output):
        return DetectionSpec(path, None, Normalisation(0.0, 1.0, "BGR"), "yunet", "opencv-yunet-1")
    if outputs in SCRFD_OUTPUTS:
        return DetectionSpec(path, None, Normalisation(127.5, 128.0), "scrfd", "insightface-scrfd-1")
    if outputs != 1 or height != width or height < 112 or height % 16:
        return None
    names = [node.name for node in graph.node[:FIRST_NODES]]
    subtracts = any(name.startswith(("Sub", "_minus")) for name in names)
    multiplies = any(name.startswith(("Mul", "_mul")) for name in names)
    normalisation = Normalisation(0.0, 1.0) if subtracts and multiplies else Normalisation(127.5, 127.5)
    dims = [d.dim_value for d in graph.output[0].type.tensor_type.shape.dim]
    if not dims or dims[-1] <= 0:
        raise PackError(path.name, "does not declare the length of its embedding")
    return RecognitionSpec(path, None, normalisation, standard(height), dims[-1], "insightface-arcface-1")

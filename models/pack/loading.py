"""Finding and loading of model packs, with or without a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from models.errors import PackError
from models.pack.manifest import (
    CALIBRATION_FILE,
    MANIFEST_FILE,
    MANIFEST_VERSION,
    ModelPack,
    attach_calibration,
    attach_variants,
    parse_manifest,
    read_json,
)
from models.runtime.onnx_check import read_model
from models.vision.alignment import standard_alignment
from models.vision.specs import DetectionSpec, Normalization, RecognitionSpec

BUNDLED_PACK: Final = Path(__file__).parents[1] / "packs" / "kith-compact"
SCRFD_OUTPUTS: Final = (6, 9, 10, 15)
YUNET_OUTPUTS: Final = 12
FIRST_NODES: Final = 8


def find_pack(name: Path, models_dir: Path) -> Path:
    """Resolve a pack name to a pulled or bundled pack. Existing directories and unknown names are returned as is."""
    if not name.expanduser().is_dir() and len(name.parts) == 1:
        for directory in (models_dir / name, BUNDLED_PACK.parent / name):
            if directory.is_dir():
                return directory
    return name


def is_bundled(pack: ModelPack) -> bool:
    """Tell whether a pack is part of Kith, whose files commands do not change."""
    return pack.directory.parent == BUNDLED_PACK.parent.resolve()


def load_pack(directory: Path) -> ModelPack:
    """Load a pack from its manifest, or from an unversioned directory of ONNX files.

    Raises:
        PackError: the directory, its manifest or a field of it is invalid.
    """
    directory = directory.expanduser().resolve()
    if not directory.is_dir():
        raise PackError(
            "pack", f"{directory} is not a directory, nor the name of a pulled pack (KITH_PACK names the one to serve)"
        )
    manifest = directory / MANIFEST_FILE
    if manifest.is_file():
        document = read_json(manifest)
        if document.get("manifest_version") == MANIFEST_VERSION:
            return parse_manifest(directory, document)
    calibration = CALIBRATION_FILE if (directory / CALIBRATION_FILE).is_file() else None
    return attach_calibration(attach_variants(_load_unversioned(directory)), calibration)


def _load_unversioned(directory: Path) -> ModelPack:
    """Find a detector and a recognizer among ``directory/*.onnx``; the first file of each kind wins.

    Covers InsightFace's older packs and OpenCV Zoo's YuNet and SFace, with InsightFace's own routing rules.
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
        raise PackError("tasks.recognition", f"no 112x112 recognizer among {directory.name}/*.onnx")
    return ModelPack(directory, directory.name, directory.name, detection, recognition)


def _classify(path: Path) -> DetectionSpec | RecognitionSpec | None:
    """Return the spec of a network, judged by its inputs, outputs and first nodes; None for other networks."""
    graph = read_model(path).graph
    initialized = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in initialized]
    if not inputs:
        return None
    height, width = ([d.dim_value for d in inputs[0].type.tensor_type.shape.dim] + [0, 0, 0, 0])[2:4]
    outputs = len(graph.output)
    if outputs == YUNET_OUTPUTS and any(o.name.startswith("kps") for o in graph.output):
        return DetectionSpec(path, None, Normalization(0.0, 1.0, "BGR"), "yunet")
    if outputs in SCRFD_OUTPUTS:
        return DetectionSpec(path, None, Normalization(127.5, 128.0), "scrfd")
    if outputs != 1 or height != width or height < 112 or height % 16:
        return None
    # A recognizer whose first nodes subtract and multiply normalizes its own input.
    names = [node.name for node in graph.node[:FIRST_NODES]]
    subtracts = any(name.startswith(("Sub", "_minus")) for name in names)
    multiplies = any(name.startswith(("Mul", "_mul")) for name in names)
    normalization = Normalization(0.0, 1.0) if subtracts and multiplies else Normalization(127.5, 127.5)
    dims = [d.dim_value for d in graph.output[0].type.tensor_type.shape.dim]
    if not dims or dims[-1] <= 0:
        raise PackError(path.name, "does not declare the length of its embedding")
    return RecognitionSpec(path, None, normalization, standard_alignment(height), dims[-1], "insightface-arcface-1")

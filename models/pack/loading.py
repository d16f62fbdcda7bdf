"""Finding and loading of model packs, with or without a manifest.

ONNX files without a manifest are routed by the rules of ``insightface.model_zoo.ModelRouter``: by the number of outputs
and the input size. Kith also reads the output shapes, because InsightFace's rules take every network with a square
input for a recognizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from models.errors import PackError
from models.pack.manifest import (
    CALIBRATION_FILE,
    MANIFEST_FILE,
    ModelPack,
    load_liveness,
    parse_manifest,
    read_json,
    read_manifest,
    with_int8_files,
)
from models.runtime.onnx_check import BUNDLED_PACKS_DIR, check_model, read_model
from models.vision.alignment import insightface_alignment
from models.vision.detection import SCRFD_COLUMNS, SCRFD_STRIDES
from models.vision.specs import DetectionSpec, NetworkSpec, Normalization, RecognitionSpec

if TYPE_CHECKING:
    import onnx

BUNDLED_PACK: Final = BUNDLED_PACKS_DIR / "kith-compact"
LIVENESS_DIR: Final = "liveness"
"""Folder of the models directory with a folder for each pulled liveness network."""
MIN_DETECTOR_OUTPUTS: Final = 5
YUNET_OUTPUTS: Final = 12
FLOAT_TYPES: Final = (1, 10, 11)
"""ONNX's FLOAT, FLOAT16 and DOUBLE."""
EMBEDDING_MULTIPLE: Final = 64
"""Usual embeddings have a multiple of 64 numbers. Attributes, emotions and landmarks have other lengths."""
FIRST_NODES: Final = 8


def find_pack(name: Path, models_dir: Path) -> Path:
    """Resolve a pack name to a pulled or bundled pack. Existing directories and unknown names are returned as is."""
    if not name.expanduser().is_dir() and len(name.parts) == 1:
        for directory in (models_dir / name, BUNDLED_PACK.parent / name):
            if directory.is_dir():
                return directory
    return name


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
    document = read_manifest(directory)
    return with_int8_files(_load_unversioned(directory) if document is None else parse_manifest(directory, document))


def with_pulled_liveness(pack: ModelPack, models_dir: Path) -> ModelPack:
    """Return a pack without a liveness network with the one that was pulled last, if there is one.

    Raises:
        PackError: the pulled network is invalid.
    """
    manifests = sorted((models_dir / LIVENESS_DIR).glob(f"*/{MANIFEST_FILE}"), key=lambda path: path.stat().st_mtime)
    if pack.liveness is not None or not manifests:
        return pack
    return replace(pack, liveness=load_liveness(manifests[-1].parent))


def _load_unversioned(directory: Path) -> ModelPack:
    """Find a detector and a recognizer among ``directory/*.onnx``, with InsightFace's routing.

    Covers InsightFace's older packs and OpenCV Zoo's YuNet and SFace. Other networks are ignored, whatever they hold.
    """
    # Hidden files, such as macOS's `._detector.onnx`, are no networks. InsightFace skips them too.
    paths = [path for path in sorted(directory.glob("*.onnx")) if not path.name.startswith(".")]
    routed = {path: _route_file(path) for path in paths}
    detectors = [found for found in routed.values() if isinstance(found, DetectionSpec)]
    recognizers = [found for found in routed.values() if isinstance(found, RecognitionSpec)]
    ignored = {path.name: found for path, found in routed.items() if isinstance(found, str)}
    listed = "".join(f"; ignored {name}: {reason}" for name, reason in ignored.items())
    recognizers.sort(key=lambda spec: spec.dimension % EMBEDDING_MULTIPLE != 0)
    kinds: list[tuple[str, str, Sequence[NetworkSpec]]]
    kinds = [("detection", "detector", detectors), ("recognition", "recognizer", recognizers)]
    for task, kind, found in kinds:
        if not found:
            raise PackError(f"tasks.{task}", f"no {kind} among {directory.name}/*.onnx{listed}")
        ignored |= {spec.path.name: f"a further {kind}; {found[0].path.name} is used" for spec in found[1:]}
    pack = ModelPack(directory, directory.name, directory.name, detectors[0], recognizers[0], ignored=ignored)
    calibration = directory / CALIBRATION_FILE
    return replace(pack, calibration=read_json(calibration)) if calibration.is_file() else pack


def _route_file(path: Path) -> DetectionSpec | RecognitionSpec | str:
    """Return the spec of a detector or recognizer, or the reason why the file is neither."""
    try:
        model = read_model(path)
        found = _route(path, model.graph)
        if not isinstance(found, str):
            check_model(model, path.name)
    except PackError as error:
        return error.problem
    return found


def _route(path: Path, graph: onnx.GraphProto) -> DetectionSpec | RecognitionSpec | str:
    initialized = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in initialized]
    shape = _sides(inputs[0]) if inputs else []
    if len(shape) != 4 or shape[1] not in (0, 3):
        return "its first input takes no images (batch, 3, height, width)"
    if inputs[0].type.tensor_type.elem_type not in FLOAT_TYPES:
        return "its input has another type than FLOAT, FLOAT16 and DOUBLE"
    if len(graph.output) >= MIN_DETECTOR_OUTPUTS:
        return _route_detector(path, graph)
    height, width = shape[2:]
    return _route_recognizer(path, graph, height, width)


def _route_detector(path: Path, graph: onnx.GraphProto) -> DetectionSpec | str:
    outputs = len(graph.output)
    if outputs == YUNET_OUTPUTS and any(output.name.startswith("kps") for output in graph.output):
        return DetectionSpec(path, None, Normalization(0.0, 1.0, "BGR"), "yunet")
    if outputs not in SCRFD_STRIDES:
        return f"a network with {outputs} outputs, neither SCRFD with five points nor YuNet"
    for number, output in enumerate(graph.output):
        columns = SCRFD_COLUMNS[number // len(SCRFD_STRIDES[outputs])]
        if (declared := _sides(output)) and declared[-1] not in (0, columns):
            return f"a network with {outputs} outputs of other shapes than SCRFD's"
    return DetectionSpec(path, None, Normalization(127.5, 128.0), "scrfd")


def _route_recognizer(path: Path, graph: onnx.GraphProto, height: int, width: int) -> RecognitionSpec | str:
    alignment = insightface_alignment(height) if 0 < height == width else None
    if alignment is None:
        return f"InsightFace defines no face crop of {width}x{height}: describe it in manifest.json"
    if len(graph.output) != 1:
        return f"a network with {len(graph.output)} outputs"
    declared = _sides(graph.output[0])
    row = declared[1:] if len(declared) > 1 else declared
    dimension = math.prod(row)
    if not row or dimension == 0:
        return "it declares no length of its embedding: state it in manifest.json"
    if dimension != max(row):
        return f"it returns {'x'.join(map(str, row))} numbers, which are no embedding"
    # A recognizer whose first nodes subtract and multiply normalizes its own input.
    names = [node.name for node in graph.node[:FIRST_NODES]]
    subtracts = any(name.startswith(("Sub", "_minus")) for name in names)
    multiplies = any(name.startswith(("Mul", "_mul")) for name in names)
    normalization = Normalization(0.0, 1.0) if subtracts and multiplies else Normalization(127.5, 127.5)
    return RecognitionSpec(path, None, normalization, alignment, dimension, "insightface-arcface-1")


def _sides(value: onnx.ValueInfoProto) -> list[int]:
    """Return the declared sides of a tensor; 0 for an open side, and no sides for a tensor without a shape."""
    return [max(0, side.dim_value) for side in value.type.tensor_type.shape.dim]

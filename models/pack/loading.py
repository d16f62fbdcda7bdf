"""Finding and loading of model packs, with or without a manifest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from models.errors import PackError
from models.pack.fields import read_object
from models.pack.manifest import (
    CALIBRATION_FILE,
    MANIFEST_FILE,
    MANIFEST_VERSION,
    ModelPack,
    attach_calibration,
    attach_variants,
    parse_liveness,
    parse_manifest,
    read_json,
)
from models.pack.routing import choose_recognizer, route
from models.vision.specs import DetectionSpec, LivenessSpec, RecognitionSpec

BUNDLED_PACK: Final = Path(__file__).parents[1] / "packs" / "kith-compact"
LIVENESS_DIR: Final = "liveness"
"""Folder of the models directory with a folder for each pulled liveness network."""


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


def load_liveness(directory: Path) -> LivenessSpec:
    """Load a liveness network that is no part of a pack. Raises PackError if it is missing or invalid."""
    directory = directory.resolve()
    document = read_json(directory / MANIFEST_FILE)
    return parse_liveness(directory, read_object(document, "tasks", "tasks"))


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
    routed = {path: route(path) for path in paths}
    detectors = [found for found in routed.values() if isinstance(found, DetectionSpec)]
    recognizers = [found for found in routed.values() if isinstance(found, RecognitionSpec)]
    ignored = {path.name: found for path, found in routed.items() if isinstance(found, str)}
    listed = "".join(f"; ignored {name}: {reason}" for name, reason in ignored.items())
    if not detectors:
        raise PackError(
            "tasks.detection", f"no SCRFD or YuNet detector with five points among {directory.name}/*.onnx{listed}"
        )
    if not recognizers:
        raise PackError("tasks.recognition", f"no recognizer among {directory.name}/*.onnx{listed}")
    detection, recognition = detectors[0], choose_recognizer(recognizers)
    for kind, chosen, every in (("detector", detection, detectors), ("recognizer", recognition, recognizers)):
        ignored |= {
            spec.path.name: f"a further {kind}; {chosen.path.name} is used" for spec in every if spec is not chosen
        }
    return ModelPack(directory, directory.name, directory.name, detection, recognition, ignored=ignored)

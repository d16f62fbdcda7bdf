"""Model packs and their manifest.

``manifest.json`` is version 2 of InsightFace's model-package manifest, so ``insightface.app.FaceAnalysis`` loads the
same directory. Kith adds the keys ``provenance``, ``metrics`` and ``calibration``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from models.errors import PackError
from models.fields import Name, Number, PositiveInt, checked
from models.runtime.network import IR_SUFFIX, is_ir, network_sha256, weights_file
from models.runtime.onnx_check import check_network
from models.vision.alignment import LANDMARK_COUNT, STANDARD_ALIGNMENT, Alignment, standard_alignment
from models.vision.specs import BoxCrops, DetectionSpec, Int8File, LivenessSpec, NetworkSpec, RecognitionSpec

MANIFEST_FILE: Final = "manifest.json"
MANIFEST_VERSION: Final = 2
CALIBRATION_FILE: Final = "calibration.json"
INT8_FILE: Final = "int8.json"
"""INT8 files of a pack by task, as `kith models quantize` writes them."""
LICENSE_FILE: Final = "MODEL.LICENSE"
MAX_JSON_BYTES: Final = 16_000_000
MAX_CROP_PX: Final = 2048
MAX_LIVENESS_CROPS: Final = 8
MAX_FACE_SIZES: Final = 10.0
LIVENESS_ALIGNMENT: Final = Alignment(
    80, ((32.03, 38.06), (47.89, 37.98), (40.01, 47.08), (33.50, 56.36), (46.63, 56.29))
)
"""Default of ``insightface.addons.liveness``: a small face with a wide margin."""

TASKS: Final[Mapping[str, tuple[Any, Mapping[str, Any]]]] = {
    "detection": (DetectionSpec, {"preprocessing": {"mean": 127.5, "std": 128.0}, "head": "scrfd"}),
    "recognition": (
        RecognitionSpec,
        {
            "preprocessing": {"mean": 127.5, "std": 127.5},
            "embedding_dimension": 512,
            "preprocessing_version": "insightface-arcface-1",
        },
    ),
    "liveness": (
        LivenessSpec | None,
        {"preprocessing": {"mean": 0.0, "std": 255.0}, "live_class": None, "threshold": 0.8, "max_outside": 0.3},
    ),
}
"""Spec and defaults of each task, as in InsightFace and ``insightface.addons.liveness``."""
NETWORK_SUFFIXES: Final = {"recognition": (".onnx", IR_SUFFIX)}
"""Suffixes of a task's network file, by task; a task that is not listed has ONNX files only."""
FaceSize = Annotated[Number, Field(ge=1, le=MAX_FACE_SIZES)]
FaceSizes = Annotated[tuple[FaceSize, ...], Field(min_length=1, max_length=MAX_LIVENESS_CROPS)]
Points = Annotated[tuple[tuple[Number, Number], ...], Field(min_length=LANDMARK_COUNT, max_length=LANDMARK_COUNT)]
Template = Annotated[dict[Literal["template"], Points], Field(min_length=1)]
InputSize = tuple[PositiveInt, Annotated[PositiveInt, Field(le=MAX_CROP_PX)]]

_SAFE_PATH: Final = re.compile(r"[A-Za-z0-9_.-][A-Za-z0-9_./ -]{0,199}")


@dataclass(frozen=True)
class ModelPack:
    """Parsed model pack. Its networks are not open yet.

    Args:
        ignored: other ONNX files in a directory without a manifest, by name, with the reason.
    """

    directory: Path
    model_id: Name
    display_name: str
    detection: DetectionSpec
    recognition: RecognitionSpec
    liveness: LivenessSpec | None = None
    calibration: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_int8(self) -> bool:
        """Tell whether a network has an INT8 file."""
        return self.detection.int8 is not None or self.recognition.int8 is not None

    @property
    def specs(self) -> dict[str, NetworkSpec]:
        """Specs of the networks by task."""
        found: dict[str, NetworkSpec | None]
        found = {"detection": self.detection, "recognition": self.recognition, "liveness": self.liveness}
        return {task: spec for task, spec in found.items() if spec is not None}

    def name_of(self, path: Path) -> str:
        """Return a file's path relative to the pack, as in the manifest; the name of a file outside the pack."""
        return path.relative_to(self.directory).as_posix() if path.is_relative_to(self.directory) else path.name

    def verify(self) -> None:
        """Check all files against the manifest, and the calibration against the recognizer.

        Raises:
            PackError: a file has another checksum or is no acceptable network, or the calibration was measured with
                another recognizer.
        """
        for task, spec in self.specs.items():
            verify_file(spec.path, spec.sha256, f"tasks.{task}.sha256")
            if (int8 := spec.int8) is not None:
                if int8.of != (actual := network_sha256(spec.path)):
                    raise PackError(
                        f"int8.{task}.of",
                        f"{spec.path.name} has {actual[:12]}..., the INT8 file was made from {int8.of[:12]}...: "
                        "remove or recreate it",
                    )
                verify_file(int8.path, int8.sha256, f"int8.{task}.sha256")
        measured = (self.calibration or {}).get("recognizer")
        if measured is not None and measured != (own := self.recognition.fingerprint()):
            raise PackError(
                "calibration",
                f"it was measured with another recognizer ({str(measured)[:12]}..., not {own[:12]}...): measure "
                "it again with `kith models calibrate PACK --photos FOLDER`, or remove it",
            )


def verify_file(path: Path, sha256: str | None, name: str) -> None:
    """Check a file's sha256, if it is known, and that it is an acceptable network. Raises PackError."""
    if sha256 is not None and (actual := network_sha256(path)) != sha256:
        raise PackError(name, f"{path.name} has {actual[:12]}..., the manifest says {sha256[:12]}...")
    if not is_ir(path):
        check_network(path)


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON object of at most MAX_JSON_BYTES.

    Raises:
        PackError: the file cannot be read or holds something else.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise PackError(path.name, f"has more than {MAX_JSON_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PackError(path.name, f"is not readable JSON ({error})") from error
    if not isinstance(document, dict):
        raise PackError(path.name, "must hold a JSON object")
    return document


def read_manifest(directory: Path) -> Mapping[str, Any] | None:
    """Return a pack's manifest; None if it has none of the version that Kith reads."""
    manifest = directory / MANIFEST_FILE
    document = read_json(manifest) if manifest.is_file() else {}
    return document if document.get("manifest_version") == MANIFEST_VERSION else None


def parse_manifest(directory: Path, document: Mapping[str, Any]) -> ModelPack:
    """Validate a manifest of version 2 in a resolved ``directory``.

    Raises:
        PackError: a field is missing or invalid.
    """
    # InsightFace requires this key. The file itself may be absent (docs/decisions.md, 3).
    if PurePosixPath(str(document.get("license"))).name != LICENSE_FILE:
        raise PackError("license", f"must end in {LICENSE_FILE}")
    fields = {name: document[name] for name in ("model_id", "provenance", "metrics") if name in document}
    fields |= {"directory": directory, "display_name": str(document.get("display_name", document.get("model_id")))}
    fields |= {task: _read_task(directory, document, task) for task in TASKS}
    if (calibration := document.get("calibration")) is not None:
        fields["calibration"] = read_json(_pack_file(directory, calibration, "calibration", (".json",)))
    pack: ModelPack = checked(ModelPack, fields)
    return pack


def with_int8_files(pack: ModelPack) -> ModelPack:
    """Return a pack with the files of its INT8_FILE, if it has one. Raises PackError if a field is invalid."""
    if not (pack.directory / INT8_FILE).is_file():
        return pack
    files: dict[str, Int8File] = {}
    for task, entry in read_json(pack.directory / INT8_FILE).items():
        fields = checked(dict[str, Any], entry, f"int8.{task}")
        path = _pack_file(pack.directory, fields.get("file"), f"int8.{task}.file")
        files[task] = checked(Int8File, fields | {"file": path}, f"int8.{task}")
    detection = replace(pack.detection, int8=files.get("detection"))
    return replace(pack, detection=detection, recognition=replace(pack.recognition, int8=files.get("recognition")))


def load_liveness(directory: Path) -> LivenessSpec:
    """Load a liveness network that is no part of a pack. Raises PackError if it is missing or invalid."""
    found = _read_task(directory.resolve(), read_json(directory / MANIFEST_FILE), "liveness")
    spec: LivenessSpec = checked(LivenessSpec, found, "tasks.liveness")
    return spec


def _read_task(directory: Path, document: Mapping[str, Any], task: str) -> Any:
    """Return the spec of a task of a manifest; None if the task is optional and missing."""
    (kind, defaults), name = TASKS[task], f"tasks.{task}"
    given = checked(dict[str, dict[str, Any] | None], document.get("tasks"), "tasks").get(task)
    if given is None:
        return checked(kind, None, name)
    fields = {"sha256": None, "color": "RGB", **defaults, **given, "int8": None}
    fields["file"] = _pack_file(directory, fields.get("file"), f"{name}.file", NETWORK_SUFFIXES.get(task, (".onnx",)))
    if fields["preprocessing"] == "embedded":
        fields["preprocessing"] = {"mean": 0.0, "std": 1.0}
    if isinstance(fields["preprocessing"], dict):
        fields["preprocessing"] = {**fields["preprocessing"], "color": fields["color"]}
    if task == "recognition":
        fields["alignment"] = _crops(fields, name, STANDARD_ALIGNMENT)
        fields["preprocessing_version"] = str(fields["preprocessing_version"])
    elif task == "liveness":
        sizes = checked(FaceSizes | None, fields.get("face_sizes"), f"{name}.face_sizes")
        fields["crop"] = _crops(fields, name, LIVENESS_ALIGNMENT, sizes)
    return checked(kind, fields, name)


def _crops(
    fields: Mapping[str, Any], name: str, default: Alignment, face_sizes: tuple[float, ...] | None = None
) -> Alignment | BoxCrops:
    """Return the geometry of a task's crops.

    A manifest without a template has that of ``default``, or for crops of another size the standard template.
    """
    columns = 1 if face_sizes is None else len(face_sizes)
    size = checked(InputSize | None, fields.get("input_size"), f"{name}.input_size")
    if size is not None and size[0] != columns * size[1]:
        problem = f"must be the width and height of {columns} square crops, side by side"
        raise PackError(f"{name}.input_size", problem)
    if face_sizes is not None:
        if size is None:
            raise PackError(f"{name}.input_size", "is required beside face_sizes")
        return BoxCrops(size[1], face_sizes)
    size_px = default.size_px if size is None else size[1]
    if (given := fields.get("alignment")) is None:
        return default if size_px == default.size_px else standard_alignment(size_px)
    return Alignment(size_px, checked(Template, given, f"{name}.alignment")["template"])


def _pack_file(directory: Path, value: object, name: str, suffixes: tuple[str, ...] = (".onnx",)) -> Path:
    """Return the path of a file in the pack's directory. Symbolic links that lead out of it are rejected.

    Raises:
        PackError: the ``value`` of the field ``name`` is no such file.
    """
    if not isinstance(value, str) or not _SAFE_PATH.fullmatch(value) or ".." in PurePosixPath(value).parts:
        raise PackError(name, f"{value!r} must be a plain relative path inside the pack")
    path = (directory / value).resolve()
    if not path.is_relative_to(directory):
        raise PackError(name, f"{value!r} must be inside the pack")
    if path.suffix.lower() not in suffixes:
        raise PackError(name, f"{value!r} must end in {' or '.join(suffixes)}")
    if not path.is_file():
        raise PackError(name, f"{value!r} does not exist in the pack")
    if is_ir(path):
        _pack_file(directory, str(weights_file(Path(value))), name, (".bin",))
    return path

"""Model packs and their manifest.

``manifest.json`` is version 2 of InsightFace's model-package manifest, so ``insightface.app.FaceAnalysis`` loads the
same directory. Kith adds the keys ``provenance``, ``metrics`` and ``calibration``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from models.errors import PackError
from models.pack.fields import Name, Number, PositiveInt, Sha256, Share, Text, pack_error
from models.runtime.network import IR_SUFFIX, Engine, is_ir, network_sha256, weights_file
from models.runtime.onnx_check import check_network
from models.vision.alignment import LANDMARK_COUNT, STANDARD_ALIGNMENT, Alignment, standard_alignment
from models.vision.specs import (
    BoxCrops,
    ColorOrder,
    DetectionSpec,
    HeadKind,
    Int8File,
    LivenessSpec,
    NetworkSpec,
    Normalization,
    RecognitionSpec,
)

MANIFEST_FILE: Final = "manifest.json"
MANIFEST_VERSION: Final = 2
CALIBRATION_FILE: Final = "calibration.json"
INT8_FILE: Final = "int8.json"
"""INT8 files of a pack by task, as `kith models quantize` writes them."""
LICENSE_FILE: Final = "MODEL.LICENSE"
MAX_JSON_BYTES: Final = 16_000_000
MAX_CROP_PX: Final = 2048
MAX_DIMENSION: Final = 65_536
MAX_CLASSES: Final = 1000
MAX_LIVENESS_CROPS: Final = 8
MAX_FACE_SIZES: Final = 10.0
LIVENESS_ALIGNMENT: Final = Alignment(
    80, ((32.03, 38.06), (47.89, 37.98), (40.01, 47.08), (33.50, 56.36), (46.63, 56.29))
)
"""Default of ``insightface.addons.liveness``: a small face with a wide margin."""

_SAFE_PATH: Final = re.compile(r"[A-Za-z0-9_.-][A-Za-z0-9_./ -]{0,199}")
_Document = TypeVar("_Document", bound=BaseModel)


@dataclass(frozen=True)
class ModelPack:
    """Parsed model pack. Its networks are not open yet.

    Args:
        ignored: other ONNX files in a directory without a manifest, by name, with the reason.
    """

    directory: Path
    model_id: str
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

    def name_of(self, path: Path) -> str:
        """Return a file's path relative to the pack, as in the manifest; the name of a file outside the pack."""
        return path.relative_to(self.directory).as_posix() if path.is_relative_to(self.directory) else path.name

    def verify(self) -> None:
        """Check all files against the manifest, and the calibration against the recognizer.

        Raises:
            PackError: a file has another checksum or is no acceptable network, or the calibration was measured with
                another recognizer.
        """
        specs: dict[str, NetworkSpec] = {"detection": self.detection, "recognition": self.recognition}
        if self.liveness is not None:
            specs["liveness"] = self.liveness
        for task, spec in specs.items():
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


def parse_manifest(directory: Path, document: Mapping[str, Any]) -> ModelPack:
    """Validate a manifest of version 2 in a resolved ``directory``.

    Raises:
        PackError: a field is missing or invalid.
    """
    manifest = _validate(_Manifest, directory, document)
    tasks = manifest.tasks
    pack = ModelPack(
        directory,
        manifest.model_id,
        str(document.get("display_name", manifest.model_id)),
        tasks.detection.spec(),
        tasks.recognition.spec(),
        None if tasks.liveness is None else tasks.liveness.spec(),
        None if manifest.calibration is None else read_json(manifest.calibration),
        manifest.provenance,
        manifest.metrics,
    )
    if pack.detection.path == pack.recognition.path:
        raise PackError("tasks.recognition.file", "is the detector's file")
    if pack.liveness is not None and pack.liveness.path in (pack.detection.path, pack.recognition.path):
        raise PackError("tasks.liveness.file", "is another task's file")
    return pack


def with_int8_files(pack: ModelPack) -> ModelPack:
    """Return a pack with the files of its INT8_FILE, if it has one. Raises PackError if a field is invalid."""
    if not (pack.directory / INT8_FILE).is_file():
        return pack
    try:
        listed = _Int8List.model_validate(read_json(pack.directory / INT8_FILE), context=pack.directory)
    except ValidationError as error:
        raise pack_error(error, "int8") from error
    files = {task: file and file.spec() for task, file in listed}
    detection = replace(pack.detection, int8=files["detection"])
    return replace(pack, detection=detection, recognition=replace(pack.recognition, int8=files["recognition"]))


def load_liveness(directory: Path) -> LivenessSpec:
    """Load a liveness network that is no part of a pack. Raises PackError if it is missing or invalid."""
    directory = directory.resolve()
    return _validate(_PulledLiveness, directory, read_json(directory / MANIFEST_FILE)).tasks.liveness.spec()


def _validate(kind: type[_Document], directory: Path, document: Mapping[str, Any]) -> _Document:
    try:
        return kind.model_validate(document, context=directory)
    except ValidationError as error:
        raise pack_error(error) from error


def _pack_file(suffixes: tuple[str, ...], value: Any, info: ValidationInfo) -> Path:
    """Return the path of a file in the pack's directory. Symbolic links that lead out of it are rejected."""
    if not isinstance(value, str) or not _SAFE_PATH.fullmatch(value) or ".." in PurePosixPath(value).parts:
        raise ValueError(f"{value!r} must be a plain relative path inside the pack")
    directory = cast(Path, info.context)
    path = (directory / value).resolve()
    if not path.is_relative_to(directory):
        raise ValueError(f"{value!r} must be inside the pack")
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{value!r} must end in {' or '.join(suffixes)}")
    if not path.is_file():
        raise ValueError(f"{value!r} does not exist in the pack")
    if is_ir(path):
        _pack_file((".bin",), str(weights_file(Path(value))), info)
    return path


OnnxFile = Annotated[Path, BeforeValidator(partial(_pack_file, (".onnx",)))]
RecognizerFile = Annotated[Path, BeforeValidator(partial(_pack_file, (".onnx", IR_SUFFIX)))]
JsonFile = Annotated[Path, BeforeValidator(partial(_pack_file, (".json",)))]
FaceSize = Annotated[Number, Field(ge=1, le=MAX_FACE_SIZES)]
Points = Annotated[tuple[tuple[Number, Number], ...], Field(min_length=LANDMARK_COUNT, max_length=LANDMARK_COUNT)]


class _Int8(BaseModel):
    file: OnnxFile
    sha256: Sha256
    of: Sha256
    engines: dict[Engine, dict[str, Any]]

    def spec(self) -> Int8File:
        return Int8File(self.file, self.sha256, self.of, self.engines)


class _Int8List(BaseModel):
    detection: _Int8 | None = None
    recognition: _Int8 | None = None


class _Preprocessing(BaseModel, extra="forbid"):
    mean: Number
    std: Annotated[Number, Field(gt=0)]

    @model_validator(mode="before")
    @classmethod
    def _read_embedded(cls, value: Any) -> Any:
        return {"mean": 0.0, "std": 1.0} if value == "embedded" else value


class _Task(BaseModel):
    file: OnnxFile
    sha256: Sha256 | None = None
    preprocessing: _Preprocessing
    color: ColorOrder = "RGB"

    @property
    def normalization(self) -> Normalization:
        return Normalization(self.preprocessing.mean, self.preprocessing.std, self.color)


class _Detection(_Task):
    preprocessing: _Preprocessing = _Preprocessing(mean=127.5, std=128.0)
    head: HeadKind = "scrfd"

    def spec(self) -> DetectionSpec:
        return DetectionSpec(self.file, self.sha256, self.normalization, self.head)


class _Alignment(BaseModel, extra="forbid"):
    template: Points

    @field_validator("template")
    @classmethod
    def _is_distinct(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if len(set(points)) < len(points):
            raise ValueError("the points must differ from each other")
        return points


class _CropTask(_Task):
    input_size: tuple[PositiveInt, Annotated[PositiveInt, Field(le=MAX_CROP_PX)]] | None = None
    alignment: _Alignment | None = None

    def side_px(self, task: str, columns: int = 1) -> int | None:
        if self.input_size is not None and self.input_size[0] != columns * self.input_size[1]:
            problem = f"must be the width and height of {columns} square crops, side by side"
            raise PackError(f"tasks.{task}.input_size", problem)
        return None if self.input_size is None else self.input_size[1]

    def aligned(self, task: str, default: Alignment) -> Alignment:
        """Return the alignment. Without a template, other sizes than the default's use the standard template."""
        size_px = self.side_px(task) or default.size_px
        if self.alignment is not None:
            return Alignment(size_px, self.alignment.template)
        return default if size_px == default.size_px else standard_alignment(size_px)


class _Recognition(_CropTask):
    file: RecognizerFile
    preprocessing: _Preprocessing = _Preprocessing(mean=127.5, std=127.5)
    embedding_dimension: Annotated[PositiveInt, Field(le=MAX_DIMENSION)] = 512
    preprocessing_version: Annotated[str, BeforeValidator(str)] = "insightface-arcface-1"

    def spec(self) -> RecognitionSpec:
        return RecognitionSpec(
            self.file,
            self.sha256,
            self.normalization,
            self.aligned("recognition", STANDARD_ALIGNMENT),
            self.embedding_dimension,
            self.preprocessing_version,
        )


class _Liveness(_CropTask):
    """Liveness task, with the defaults of ``insightface.addons.liveness``."""

    preprocessing: _Preprocessing = _Preprocessing(mean=0.0, std=255.0)
    face_sizes: Annotated[tuple[FaceSize, ...], Field(min_length=1, max_length=MAX_LIVENESS_CROPS)] | None = None
    live_class: Annotated[int, Field(strict=True, ge=0, lt=MAX_CLASSES)] | None = None
    threshold: Share = 0.8
    max_outside: Share = 0.3

    def spec(self) -> LivenessSpec:
        crop: Alignment | BoxCrops
        if self.face_sizes is None:
            crop = self.aligned("liveness", LIVENESS_ALIGNMENT)
        elif (side_px := self.side_px("liveness", len(self.face_sizes))) is not None:
            crop = BoxCrops(side_px, self.face_sizes)
        else:
            raise PackError("tasks.liveness.input_size", "is required beside face_sizes")
        return LivenessSpec(
            self.file, self.sha256, self.normalization, crop, self.live_class, self.threshold, self.max_outside
        )


class _Tasks(BaseModel):
    detection: _Detection
    recognition: _Recognition
    liveness: _Liveness | None = None


class _Manifest(BaseModel):
    model_id: Name
    # InsightFace requires this key. The file itself may be absent (docs/decisions.md, 3).
    license: Annotated[Text, StringConstraints(pattern=rf"^(.*/)?{re.escape(LICENSE_FILE)}$")]
    tasks: _Tasks
    provenance: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    calibration: JsonFile | None = None


class _LivenessTask(BaseModel):
    liveness: _Liveness


class _PulledLiveness(BaseModel):
    tasks: _LivenessTask

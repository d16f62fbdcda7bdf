"""Model packs and their manifest.

``manifest.json`` is version 2 of InsightFace's model-package manifest, so ``insightface.app.FaceAnalysis`` loads the
same directory. Kith adds the keys ``provenance``, ``metrics``, ``calibration`` and ``variants``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from models.checksums import sha256_of
from models.errors import PackError
from models.pack.fields import (
    read_file,
    read_number,
    read_object,
    read_optional_object,
    read_positive_int,
    read_sha256,
    read_share,
    read_text,
)
from models.runtime.network import Precision
from models.runtime.onnx_check import check_network
from models.vision.alignment import LANDMARK_COUNT, STANDARD_ALIGNMENT, Alignment, standard_alignment
from models.vision.specs import (
    BoxCrops,
    DetectionSpec,
    HeadKind,
    LivenessSpec,
    NetworkSpec,
    Normalization,
    RecognitionSpec,
    Variant,
)

MANIFEST_FILE: Final = "manifest.json"
MANIFEST_VERSION: Final = 2
CALIBRATION_FILE: Final = "calibration.json"
VARIANTS_FILE: Final = "variants.json"
"""The manifest's ``variants``, in a directory without a manifest."""
LICENSE_FILE: Final = "MODEL.LICENSE"
MAX_JSON_BYTES: Final = 16_000_000
MAX_CROP_PX: Final = 2048
MAX_DIMENSION: Final = 65_536
MAX_CLASSES: Final = 1000
MAX_LIVENESS_CROPS: Final = 8
MAX_FACE_SIZES: Final = 10.0
VARIANT_PRECISIONS: Final[tuple[Precision, ...]] = ("bf16", "fp16", "int8")
LIVENESS_ALIGNMENT: Final = Alignment(
    80, ((32.03, 38.06), (47.89, 37.98), (40.01, 47.08), (33.50, 56.36), (46.63, 56.29))
)
"""Default of ``insightface.addons.liveness``: a small face with a wide margin."""

_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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
        return any(v.precision == "int8" for spec in (self.detection, self.recognition) for v in spec.variants)

    def name_of(self, path: Path) -> str:
        """Return a file's path relative to the pack, as in the manifest; the name of a file outside the pack."""
        return path.relative_to(self.directory).as_posix() if path.is_relative_to(self.directory) else path.name

    def verify(self) -> None:
        """Check all files against the manifest, and the calibration against the recognizer.

        Raises:
            PackError: a file is missing, has another checksum or is no acceptable network, or the calibration was
                measured with another recognizer.
        """
        specs: dict[str, NetworkSpec] = {"detection": self.detection, "recognition": self.recognition}
        if self.liveness is not None:
            specs["liveness"] = self.liveness
        for task, spec in specs.items():
            if not spec.path.is_file():
                raise PackError(f"tasks.{task}.file", f"{spec.path.name} does not exist in the pack")
            verify_file(spec.path, spec.sha256, f"tasks.{task}.sha256")
            for variant in spec.variants:
                name = f"variants.{task}.{variant.precision}"
                if variant.of != (actual := sha256_of(spec.path)):
                    raise PackError(
                        f"{name}.of",
                        f"{spec.path.name} has {actual[:12]}..., the variant was made from {variant.of[:12]}...: "
                        "remove or recreate the variant",
                    )
                if variant.path is not None:
                    verify_file(variant.path, variant.sha256, f"{name}.sha256")
        measured = (self.calibration or {}).get("recognizer")
        if measured is not None and measured != (own := self.recognition.fingerprint()):
            raise PackError(
                "calibration",
                f"it was measured with another recognizer ({str(measured)[:12]}..., not {own[:12]}...): measure "
                "it again with `kith-train calibrate`, or remove it",
            )


def verify_file(path: Path, sha256: str | None, name: str) -> None:
    """Check a file's sha256, if it is known, and that it is an acceptable network. Raises PackError."""
    if sha256 is not None and (actual := sha256_of(path)) != sha256:
        raise PackError(name, f"{path.name} has {actual[:12]}..., the manifest says {sha256[:12]}...")
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


def attach_calibration(pack: ModelPack, file: Any) -> ModelPack:
    """Return the pack with the calibration in ``file``; unchanged if ``file`` is None."""
    if file is None:
        return pack
    return replace(pack, calibration=read_json(read_file(pack.directory, file, "calibration", ".json")))


def attach_variants(pack: ModelPack) -> ModelPack:
    """Return a pack without a manifest with the variants of its VARIANTS_FILE, if there is one."""
    path = pack.directory / VARIANTS_FILE
    if not path.is_file():
        return pack
    document = {"variants": read_json(path)}
    return replace(
        pack,
        detection=replace(pack.detection, variants=_parse_variants(pack.directory, document, "detection")),
        recognition=replace(pack.recognition, variants=_parse_variants(pack.directory, document, "recognition")),
    )


def parse_manifest(directory: Path, document: Mapping[str, Any]) -> ModelPack:
    """Validate a manifest of version 2 in a resolved ``directory``.

    Raises:
        PackError: a field is missing or invalid.
    """
    model_id = read_text(document, "model_id", "model_id")
    if not _MODEL_ID.fullmatch(model_id):
        raise PackError(
            "model_id", "must be 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    # InsightFace requires this key. The file itself may be absent (docs/decisions/0003).
    if PurePosixPath(read_text(document, "license", "license")).name != LICENSE_FILE:
        raise PackError("license", f"must name {LICENSE_FILE}")
    tasks = read_object(document, "tasks", "tasks")
    pack = ModelPack(
        directory=directory,
        model_id=model_id,
        display_name=str(document.get("display_name", model_id)),
        detection=_parse_detection(directory, document, read_object(tasks, "detection", "tasks.detection")),
        recognition=_parse_recognition(directory, document, read_object(tasks, "recognition", "tasks.recognition")),
        liveness=parse_liveness(directory, tasks) if "liveness" in tasks else None,
        provenance=read_optional_object(document, "provenance"),
        metrics=read_optional_object(document, "metrics"),
    )
    if pack.detection.path == pack.recognition.path:
        raise PackError("tasks.recognition.file", "is the detector's file")
    if pack.liveness is not None and pack.liveness.path in (pack.detection.path, pack.recognition.path):
        raise PackError("tasks.liveness.file", "is another task's file")
    return attach_calibration(pack, document.get("calibration"))


def _parse_detection(directory: Path, document: Mapping[str, Any], task: Mapping[str, Any]) -> DetectionSpec:
    return DetectionSpec(
        path=read_file(directory, task.get("file"), "tasks.detection.file", ".onnx"),
        sha256=read_sha256(task, "sha256", "tasks.detection.sha256"),
        normalization=_parse_normalization(task, "tasks.detection", Normalization(127.5, 128.0)),
        head=_parse_head(task),
        variants=_parse_variants(directory, document, "detection"),
    )


def _parse_recognition(directory: Path, document: Mapping[str, Any], task: Mapping[str, Any]) -> RecognitionSpec:
    return RecognitionSpec(
        path=read_file(directory, task.get("file"), "tasks.recognition.file", ".onnx"),
        sha256=read_sha256(task, "sha256", "tasks.recognition.sha256"),
        normalization=_parse_normalization(task, "tasks.recognition", Normalization(127.5, 127.5)),
        alignment=_parse_alignment(task, "tasks.recognition", STANDARD_ALIGNMENT),
        dimension=read_positive_int(
            task.get("embedding_dimension", 512), "tasks.recognition.embedding_dimension", MAX_DIMENSION
        ),
        preprocessing_version=str(task.get("preprocessing_version", "insightface-arcface-1")),
        variants=_parse_variants(directory, document, "recognition"),
    )


def parse_liveness(directory: Path, tasks: Mapping[str, Any]) -> LivenessSpec:
    """Parse the liveness task. Defaults are those of ``insightface.addons.liveness``.

    Raises:
        PackError: a field is missing or invalid.
    """
    task, name = read_object(tasks, "liveness", "tasks.liveness"), "tasks.liveness"
    live = task.get("live_class")
    if live is not None and (isinstance(live, bool) or not isinstance(live, int) or not 0 <= live < MAX_CLASSES):
        raise PackError(f"{name}.live_class", "must be the index of a class, counted from 0")
    return LivenessSpec(
        path=read_file(directory, task.get("file"), f"{name}.file", ".onnx"),
        sha256=read_sha256(task, "sha256", f"{name}.sha256"),
        normalization=_parse_normalization(task, name, Normalization(0.0, 255.0)),
        crop=_parse_liveness_crop(task, name),
        live_class=live,
        threshold=read_share(task.get("threshold", 0.8), f"{name}.threshold"),
        max_outside=read_share(task.get("max_outside", 0.3), f"{name}.max_outside"),
    )


def _parse_liveness_crop(task: Mapping[str, Any], name: str) -> Alignment | BoxCrops:
    """Parse ``face_sizes`` with the size of crops side by side, or an alignment."""
    if "face_sizes" not in task:
        return _parse_alignment(task, name, LIVENESS_ALIGNMENT)
    sizes, shape = task["face_sizes"], task.get("input_size")
    if not isinstance(sizes, list) or not 1 <= len(sizes) <= MAX_LIVENESS_CROPS:
        raise PackError(f"{name}.face_sizes", f"must be a list of 1 to {MAX_LIVENESS_CROPS} numbers")
    numbers = tuple(read_number(size, f"{name}.face_sizes") for size in sizes)
    if not all(1 <= number <= MAX_FACE_SIZES for number in numbers):
        raise PackError(f"{name}.face_sizes", f"must be numbers from 1 to {MAX_FACE_SIZES}")
    side = read_positive_int(
        shape[1] if isinstance(shape, list) and len(shape) == 2 else None, f"{name}.input_size", MAX_CROP_PX
    )
    if shape != [side * len(numbers), side]:
        raise PackError(f"{name}.input_size", "must be the width and height of square crops side by side")
    return BoxCrops(side, numbers)


def _parse_variants(directory: Path, document: Mapping[str, Any], task: str) -> tuple[Variant, ...]:
    """Parse ``{"variants": {TASK: {PRECISION: {"file", "sha256", "of", "measured"}}}}``."""
    listed = read_optional_object(read_optional_object(document, "variants"), task)
    variants = []
    for precision in listed:
        name = f"variants.{task}.{precision}"
        if precision not in VARIANT_PRECISIONS:
            raise PackError(name, f"is not a known variant ({', '.join(VARIANT_PRECISIONS)})")
        value = read_object(listed, precision, name)
        path = read_file(directory, value["file"], f"{name}.file", ".onnx") if "file" in value else None
        if path is None and precision == "int8":
            raise PackError(f"{name}.file", "is required: runtimes do not convert networks to INT8")
        sha256 = read_sha256(value, "sha256", f"{name}.sha256")
        of = read_sha256(value, "of", f"{name}.of")
        if of is None or (path is not None and sha256 is None):
            raise PackError(name, "needs `of`, the sha256 of the main file, and the sha256 of its own file")
        measured = read_optional_object(value, "measured")
        if "points_lost" in measured:
            read_number(measured["points_lost"], f"{name}.measured.points_lost")
        variants.append(Variant(precision, path, sha256, of, measured))
    return tuple(variants)


def _parse_normalization(task: Mapping[str, Any], name: str, default: Normalization) -> Normalization:
    value = task.get("preprocessing", {"mean": default.mean, "std": default.std})
    color = task.get("color", "RGB")
    if color not in ("RGB", "BGR"):
        raise PackError(f"{name}.color", "must be RGB or BGR")
    if value == "embedded":
        return Normalization(0.0, 1.0, color)
    if not isinstance(value, dict) or set(value) != {"mean", "std"}:
        raise PackError(f"{name}.preprocessing", 'must be "embedded" or an object with exactly mean and std')
    std = read_number(value["std"], f"{name}.preprocessing.std")
    if std <= 0:
        raise PackError(f"{name}.preprocessing.std", "must be positive")
    return Normalization(read_number(value["mean"], f"{name}.preprocessing.mean"), std, color)


def _parse_head(task: Mapping[str, Any]) -> HeadKind:
    match task.get("head", "scrfd"):
        case "scrfd" | "yunet" as head:
            return head  # type: ignore[no-any-return]
        case other:
            raise PackError("tasks.detection.head", f"{other!r} is not a known head (scrfd, yunet)")


def _parse_alignment(task: Mapping[str, Any], task_name: str, default: Alignment) -> Alignment:
    """Parse the alignment. Without a template, other sizes than the default's use the standard template."""
    sides, name = task.get("input_size", [default.size_px] * 2), f"{task_name}.input_size"
    if not isinstance(sides, list) or len(sides) != 2 or sides[0] != sides[1]:
        raise PackError(name, "must be two equal integers")
    size_px = read_positive_int(sides[0], name, MAX_CROP_PX)
    if "alignment" not in task:
        return default if size_px == default.size_px else standard_alignment(size_px)
    value = read_object(task, "alignment", f"{task_name}.alignment")
    if set(value) != {"template"}:
        raise PackError(f"{task_name}.alignment", "must hold exactly template")
    name, template = f"{task_name}.alignment.template", value["template"]
    if not isinstance(template, list) or len(template) != LANDMARK_COUNT:
        raise PackError(name, f"must be a list of {LANDMARK_COUNT} points [x, y] in crop pixels")
    if not all(isinstance(point, list) and len(point) == 2 for point in template):
        raise PackError(name, "each point must be two numbers [x, y]")
    points = [(read_number(x, name), read_number(y, name)) for x, y in template]
    if len(set(points)) < LANDMARK_COUNT:
        raise PackError(name, "the points must differ from each other")
    return Alignment(size_px, tuple(points))

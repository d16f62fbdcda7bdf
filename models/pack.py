"""A model pack: a directory with networks, how to feed them, and what their scores mean.

``manifest.json`` is InsightFace's model-package manifest version 2, so that ``insightface.app.FaceAnalysis`` loads the
directory as it is; our own keys (``provenance``, ``metrics``, ``calibration``) ride beside its. Directories without
such a manifest are routed by :mod:`models.legacy`; their calibration lies beside the networks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from models.alignment import POINTS, STANDARD, Alignment, standard
from models.errors import PackError
from models.network import Engine, Precision
from models.onnx_check import check_network

MANIFEST: Final = "manifest.json"
MANIFEST_VERSION: Final = 2
CALIBRATION: Final = "calibration.json"
"""Where calibrations are written; an unversioned directory has its own under this name too."""
MAX_NUMBER: Final = 1e6
MAX_JSON_BYTES: Final = 16_000_000
MAX_SIDE_PX: Final = 2048
"""Of a crop."""
MAX_DIMENSION: Final = 65_536
MAX_CLASSES: Final = 1000
LIVENESS_ALIGNMENT: Final = Alignment(
    80, ((32.03, 38.06), (47.89, 37.98), (40.01, 47.08), (33.50, 56.36), (46.63, 56.29))
)
"""Of InsightFace's addon (``insightface.addons.liveness``): a face with much around it."""
LICENSE_FILE: Final = "MODEL.LICENSE"
VARIANTS: Final[tuple[Precision, ...]] = ("bf16", "fp16", "int8")
BUNDLED: Final = Path(__file__).parent / "packs" / "kith-compact"

_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SAFE_FILE = re.compile(r"[A-Za-z0-9_.-][A-Za-z0-9_./ -]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

ColourOrder = Literal["RGB", "BGR"]
HeadKind = Literal["scrfd", "yunet"]


@dataclass(frozen=True)
class Normalisation:
    """A network is fed (pixel - mean) / std, pixels 0..255, in this colour order."""

    mean: float
    std: float
    colour: ColourOrder = "RGB"


@dataclass(frozen=True)
class Variant:
    """The same network in other numbers: its vectors compare with those of the main file, its boxes are the same.

    ``path`` None: there is no file, the runtime rounds the main one. ``of``: sha256 of the main file that it was made
    from. ``measured``: what it loses.
    """

    precision: Precision
    path: Path | None
    sha256: str | None
    of: str
    measured: Mapping[str, Any] = field(compare=False)

    @property
    def points_lost(self) -> float | None:
        """Points of LFW View 2 accuracy, of a detector points of recall on WIDER FACE; None: nobody measured."""
        return self.measured.get("points_lost")

    def felt_in_galleries(self, engine: Engine) -> str | None:
        """In words: what changes where people are enrolled and searched in these numbers instead of fp32, at the same
        thresholds; None: nobody measured."""
        try:
            judged = self.measured["engines"][engine]["galleries"]
            before, after = judged["fp32, probes fp32"], judged[f"{self.precision}, probes {self.precision}"]
            return (
                f"in LFW's galleries TAR {before['tar']:.1%} -> {after['tar']:.1%} at FMR {before['fmr_asked']:.1%}, "
                f"FNIR {before['fnir']:.1%} -> {after['fnir']:.1%} at FPIR {before['fpir_asked']:.0%}"
            )
        except (KeyError, TypeError, ValueError):
            return None  # any pack may say anything here


@dataclass(frozen=True)
class DetectionSpec:
    path: Path
    sha256: str | None
    normalisation: Normalisation
    head: HeadKind
    preprocessing_version: str
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class RecognitionSpec:
    """``alignment``: how its crops are cut. ``dimension``: d of the embedding."""

    path: Path
    sha256: str | None
    normalisation: Normalisation
    alignment: Alignment
    dimension: int
    preprocessing_version: str
    variants: tuple[Variant, ...] = ()

    def fingerprint(self) -> str:
        """Hash of the network and of everything that shapes its input: vectors compare only where this is equal. Of the
        main file alone: a variant is the same recogniser, and how far its vectors stray is measured."""
        digest = hashlib.sha256(self.path.read_bytes())
        shape = [self.normalisation.mean, self.normalisation.std, self.normalisation.colour, self.alignment.size_px]
        digest.update(json.dumps([*shape, self.preprocessing_version]).encode())
        # The standard template is no part of it: packs had no other when the first vectors were stored.
        if not self.alignment.is_standard:
            digest.update(json.dumps(self.alignment.template).encode())
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class LivenessSpec:
    """A network that tells people from pictures of them. ``alignment``: how its crops are cut. ``live_class``: of its
    logits; None: it gives the probability itself. ``threshold``: of the score. ``max_outside``: the share of a crop
    that may lie outside of the photo."""

    path: Path
    sha256: str | None
    normalisation: Normalisation
    alignment: Alignment
    live_class: int | None
    threshold: float
    max_outside: float
    preprocessing_version: str
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class ModelPack:
    """A pack as read: nothing is opened but the manifest."""

    directory: Path
    model_id: str
    display_name: str
    detection: DetectionSpec
    recognition: RecognitionSpec
    liveness: LivenessSpec | None = None
    calibration: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def name_of(self, path: Path) -> str:
        """Of one of the pack's files, as its manifest names it: a variant has the name of its main file, elsewhere."""
        return path.relative_to(self.directory).as_posix()

    def verify(self) -> None:
        """Check every declared sha256, what the networks' files hold, and that the calibration is of this recogniser
        where it names one.

        Raises:
            PackError: a file is missing or differs from the manifest, or holds what is not opened
                (models.onnx_check), or the calibration is another recogniser's.
        """
        specs: list[tuple[str, DetectionSpec | RecognitionSpec | LivenessSpec]]
        specs = [("detection", self.detection), ("recognition", self.recognition)]
        if self.liveness is not None:
            specs.append(("liveness", self.liveness))
        for name, spec in specs:
            if not spec.path.is_file():
                raise PackError(f"tasks.{name}.file", f"{spec.path.name} does not exist in the pack")
            if spec.sha256 is not None and (actual := sha256_of(spec.path)) != spec.sha256:
                raise PackError(
                    f"tasks.{name}.sha256",
                    f"{spec.path.name} has {actual[:12]}..., the manifest says {spec.sha256[:12]}...",
                )
            check_network(spec.path)
            for variant in spec.variants:
                _verify_variant(variant, spec.path, f"variants.{name}.{variant.precision}")
        measured = (self.calibration or {}).get("recogniser")
        if measured is not None and measured != (own := self.recognition.fingerprint()):
            raise PackError(
                "calibration",
                f"it was measured with another recogniser ({str(measured)[:12]}..., not {own[:12]}...): measure "
                "it again with `kith-train calibrate`, or remove it",
            )


def _verify_variant(variant: Variant, main: Path, name: str) -> None:
    if variant.of != (actual := sha256_of(main)):
        raise PackError(
            f"{name}.of",
            f"{main.name} has {actual[:12]}..., the variant was made from {variant.of[:12]}...: remove or remake it",
        )
    if variant.path is not None and (actual := sha256_of(variant.path)) != variant.sha256:
        raise PackError(
            f"{name}.sha256",
            f"{variant.path.name} has {actual[:12]}..., the manifest says {str(variant.sha256)[:12]}...",
        )
    if variant.path is not None:
        check_network(variant.path)


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find_pack(named: Path, models_dir: Path) -> Path:
    """The directory that ``named`` means: itself, or where there is none, a pulled or a bundled pack of that name."""
    if not named.expanduser().is_dir() and len(named.parts) == 1:
        for directory in (models_dir / named, BUNDLED.parent / named):
            if directory.is_dir():
                return directory
    return named


def load_pack(directory: Path) -> ModelPack:
    """Read a pack: by its manifest version 2, else as an unversioned directory of ONNX files.

    Raises:
        PackError: the directory, its manifest or a field of it cannot be used; the error names the field.
    """
    directory = directory.expanduser().resolve()
    if not directory.is_dir():
        raise PackError(
            "pack", f"{directory} is not a directory, nor the name of a pulled pack (KITH_PACK names the one to serve)"
        )
    manifest = directory / MANIFEST
    if manifest.is_file():
        document = _read_json(manifest)
        if document.get("manifest_version") == MANIFEST_VERSION:
            return _parse(directory, document)
    # Imported here: only unversioned packs need the onnx package, which costs 30 MB of memory.
    from models.legacy import route_directory

    return _calibrated(route_directory(directory), CALIBRATION if (directory / CALIBRATION).is_file() else None)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise PackError(path.name, f"has more than {MAX_JSON_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PackError(path.name, f"is not readable JSON ({error})") from error
    if not isinstance(document, dict):
        raise PackError(path.name, "must hold a JSON object")
    return document


def _parse(directory: Path, document: Mapping[str, Any]) -> ModelPack:
    model_id = _text(document, "model_id", "model_id")
    if not _MODEL_ID.fullmatch(model_id):
        raise PackError(
            "model_id", "must be 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    # InsightFace requires the key to name this file; the file itself may be absent (see docs/decisions/0003).
    if PurePosixPath(_text(document, "license", "license")).name != LICENSE_FILE:
        raise PackError("license", f"must name {LICENSE_FILE}")
    tasks = _object(document, "tasks", "tasks")
    detection = _object(tasks, "detection", "tasks.detection")
    recognition = _object(tasks, "recognition", "tasks.recognition")
    pack = ModelPack(
        directory=directory,
        model_id=model_id,
        display_name=str(document.get("display_name", model_id)),
        detection=DetectionSpec(
            path=_file(directory, detection.get("file"), "tasks.detection.file", ".onnx"),
            sha256=_sha256(detection, "tasks.detection.sha256"),
            normalisation=_normalisation(detection, "tasks.detection", Normalisation(127.5, 128.0)),
            head=_head(detection),
            preprocessing_version=str(detection.get("preprocessing_version", "insightface-scrfd-1")),
            variants=_variants(directory, document, "detection"),
        ),
        recognition=RecognitionSpec(
            path=_file(directory, recognition.get("file"), "tasks.recognition.file", ".onnx"),
            sha256=_sha256(recognition, "tasks.recognition.sha256"),
            normalisation=_normalisation(recognition, "tasks.recognition", Normalisation(127.5, 127.5)),
            alignment=_alignment(recognition, "tasks.recognition", STANDARD),
            dimension=_positive(
                recognition.get("embedding_dimension", 512), "tasks.recognition.embedding_dimension", MAX_DIMENSION
            ),
            preprocessing_version=str(recognition.get("preprocessing_version", "insightface-arcface-1")),
            variants=_variants(directory, document, "recognition"),
        ),
        liveness=_liveness(directory, tasks),
        provenance=_optional_object(document, "provenance"),
        metrics=_optional_object(document, "metrics"),
    )
    if pack.detection.path == pack.recognition.path:
        raise PackError("tasks.recognition.file", "is the detector's file")
    if pack.liveness is not None and pack.liveness.path in (pack.detection.path, pack.recognition.path):
        raise PackError("tasks.liveness.file", "is another task's file")
    return _calibrated(pack, document.get("calibration"))


def _liveness(directory: Path, tasks: Mapping[str, Any]) -> LivenessSpec | None:
    """What is not said is as InsightFace's addon has it."""
    if "liveness" not in tasks:
        return None
    task, name = _object(tasks, "liveness", "tasks.liveness"), "tasks.liveness"
    live = task.get("live_class")
    if live is not None and (isinstance(live, bool) or not isinstance(live, int) or not 0 <= live < MAX_CLASSES):
        raise PackError(f"{name}.live_class", "must be the number of a class, from 0")
    return LivenessSpec(
        path=_file(directory, task.get("file"), f"{name}.file", ".onnx"),
        sha256=_sha256(task, f"{name}.sha256"),
        normalisation=_normalisation(task, name, Normalisation(0.0, 255.0)),
        alignment=_alignment(task, name, LIVENESS_ALIGNMENT),
        live_class=live,
        threshold=_share(task.get("threshold", 0.8), f"{name}.threshold"),
        max_outside=_share(task.get("max_outside", 0.3), f"{name}.max_outside"),
        preprocessing_version=str(task.get("preprocessing_version", "insightface-liveness-1")),
    )


def _variants(directory: Path, document: Mapping[str, Any], task: str) -> tuple[Variant, ...]:
    """By precision, of ``{"variants": {TASK: {PRECISION: {"file", "sha256", "of", "measured"}}}}``; ``file`` and its
    ``sha256`` only where there is one."""
    listed = _optional_object(_optional_object(document, "variants"), task)
    variants = []
    for precision in listed:
        name = f"variants.{task}.{precision}"
        if precision not in VARIANTS:
            raise PackError(name, f"is not a known variant ({', '.join(VARIANTS)})")
        value = _object(listed, precision, name)
        path = _file(directory, value["file"], f"{name}.file", ".onnx") if "file" in value else None
        if path is None and precision == "int8":
            raise PackError(f"{name}.file", "is required: no runtime makes INT8 of a file by itself")
        own = _sha256(value, f"{name}.sha256")
        of = _sha256({"sha256": value.get("of")}, f"{name}.of")
        if of is None or (path is not None and own is None):
            raise PackError(name, "needs of, the sha256 of the main file that it was made from, and its file's sha256")
        measured = _optional_object(value, "measured")
        if "points_lost" in measured:
            _number(measured["points_lost"], f"{name}.measured.points_lost")
        variants.append(Variant(precision, path, own, of, measured))
    return tuple(variants)


def _calibrated(pack: ModelPack, file: Any) -> ModelPack:
    if file is None:
        return pack
    return replace(pack, calibration=_read_json(_file(pack.directory, file, "calibration", ".json")))


def _text(document: Mapping[str, Any], key: str, name: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value.strip():
        raise PackError(name, "is required and must be a non-empty string")
    return value.strip()


def _object(document: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise PackError(name, "is required and must be an object")
    return value


def _optional_object(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return _object(document, key, key) if key in document else {}


def _file(directory: Path, value: Any, name: str, suffix: str) -> Path:
    if not isinstance(value, str) or not value.strip():
        raise PackError(name, "is required and must be a file name")
    if not _SAFE_FILE.fullmatch(value) or ".." in PurePosixPath(value).parts:
        raise PackError(name, f"{value!r} must be a plain relative path inside the pack")
    path = (directory / value).resolve()
    if not path.is_relative_to(directory):
        raise PackError(name, f"{value!r} must lie inside the pack")
    if path.suffix.lower() != suffix:
        raise PackError(name, f"{value!r} must end in {suffix}")
    if not path.is_file():
        raise PackError(name, f"{value!r} does not exist in the pack")
    return path


def _sha256(task: Mapping[str, Any], name: str) -> str | None:
    value = task.get("sha256")
    if value is not None and not (isinstance(value, str) and _SHA256.fullmatch(value)):
        raise PackError(name, "must be 64 lower-case hexadecimal digits")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise PackError(name, "must be a finite number")
    return float(value)


def _share(value: Any, name: str) -> float:
    if not 0 <= (share := _number(value, name)) <= 1:
        raise PackError(name, "must be between 0 and 1")
    return share


def _normalisation(task: Mapping[str, Any], name: str, default: Normalisation) -> Normalisation:
    value = task.get("preprocessing", {"mean": default.mean, "std": default.std})
    colour = task.get("colour", "RGB")
    if colour not in ("RGB", "BGR"):
        raise PackError(f"{name}.colour", "must be RGB or BGR")
    if value == "embedded":
        return Normalisation(0.0, 1.0, colour)
    if not isinstance(value, dict) or set(value) != {"mean", "std"}:
        raise PackError(f"{name}.preprocessing", 'must be "embedded" or an object with exactly mean and std')
    scale = _number(value["std"], f"{name}.preprocessing.std")
    if scale <= 0:
        raise PackError(f"{name}.preprocessing.std", "must be positive")
    return Normalisation(_number(value["mean"], f"{name}.preprocessing.mean"), scale, colour)


def _head(task: Mapping[str, Any]) -> HeadKind:
    match task.get("head", "scrfd"):
        case "scrfd":
            return "scrfd"
        case "yunet":
            return "yunet"
        case other:
            raise PackError("tasks.detection.head", f"{other!r} is not a known head (scrfd, yunet)")


def _positive(value: Any, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise PackError(name, f"must be a positive integer, {most} at most")
    return value


def _square(value: Any, name: str) -> int:
    if not isinstance(value, list) or len(value) != 2 or value[0] != value[1]:
        raise PackError(name, "must be two equal integers")
    return _positive(value[0], name, MAX_SIDE_PX)


def _alignment(task: Mapping[str, Any], of: str, default: Alignment) -> Alignment:
    """The default is that of its own size; of another size the standard is."""
    size_px = _square(task.get("input_size", [default.size_px] * 2), f"{of}.input_size")
    if "alignment" not in task:
        return default if size_px == default.size_px else standard(size_px)
    value = _object(task, "alignment", f"{of}.alignment")
    if set(value) != {"template"}:
        raise PackError(f"{of}.alignment", "must hold exactly template")
    name, template = f"{of}.alignment.template", value["template"]
    if not isinstance(template, list) or len(template) != POINTS:
        raise PackError(name, f"must be a list of {POINTS} points [x, y], in pixels of the crop")
    if not all(isinstance(point, list) and len(point) == 2 for point in template):
        raise PackError(name, "each point must be two numbers, [x, y]")
    points = [(_number(x, name), _number(y, name)) for x, y in template]
    if len(set(points)) < POINTS:
        raise PackError(name, "the points must differ from each other")
    return Alignment(size_px, tuple(points))


def write_pack(
    directory: Path,
    model_id: str,
    display_name: str,
    detector: Path,
    recogniser: Path,
    dimension: int,
    calibration: Mapping[str, Any],
    provenance: Mapping[str, Any],
    metrics: Mapping[str, Any],
    alignment: Alignment = STANDARD,
    embedded: bool = False,
    preprocessing_version: str = "insightface-arcface-1",
) -> ModelPack:
    """Write the manifest and calibration of a pack whose ONNX files already lie in ``directory``; read it back.

    Args:
        alignment: of the recogniser's crops.
        embedded: the recogniser normalises its own pixels, 0..255.
        preprocessing_version: names how the recogniser's crops are made.

    Raises:
        PackError: what was written would not load; the files are left for inspection, the manifest is removed.
    """
    (directory / CALIBRATION).write_text(json.dumps(calibration) + "\n", encoding="utf-8")
    document = {
        "manifest_version": MANIFEST_VERSION,
        "model_id": model_id,
        "display_name": display_name,
        "license": LICENSE_FILE,
        "tasks": {
            "detection": {
                "file": detector.name,
                "sha256": sha256_of(detector),
                "preprocessing": {"mean": 127.5, "std": 128.0},
                "preprocessing_version": "insightface-scrfd-1",
            },
            "recognition": {
                "file": recogniser.name,
                "sha256": sha256_of(recogniser),
                "preprocessing": "embedded" if embedded else {"mean": 127.5, "std": 127.5},
                "preprocessing_version": preprocessing_version,
                "input_size": [alignment.size_px, alignment.size_px],
                **({} if alignment.is_standard else {"alignment": {"template": alignment.template}}),
                "embedding_dimension": dimension,
            },
        },
        "calibration": CALIBRATION,
        "provenance": provenance,
        "metrics": metrics,
    }
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    try:
        pack = load_pack(directory)
        pack.verify()
    except PackError:
        manifest.unlink()
        raise
    return pack


def update_manifest(directory: Path, provenance: Mapping[str, Any], metrics: Mapping[str, Any]) -> ModelPack:
    """Write what is newly known of a pack whose networks stay; read it back.

    Raises:
        PackError: the pack has no manifest version 2.
    """
    manifest = directory / MANIFEST
    if not manifest.is_file():
        raise PackError(
            MANIFEST, f"does not exist in {directory}: an unversioned directory has nowhere to keep figures"
        )
    document = {**_read_json(manifest), "provenance": provenance, "metrics": metrics}
    if document.get("manifest_version") != MANIFEST_VERSION:
        raise PackError("manifest_version", f"must be {MANIFEST_VERSION}")
    _replace(manifest, json.dumps(document, indent=2))
    return load_pack(directory)


def update_variants(directory: Path, variants: Mapping[str, Any]) -> ModelPack:
    """Write what a pack's networks are in other numbers (``variants`` of the manifest), beside which its files must lie
    by now; read it back.

    Raises:
        PackError: the pack has no manifest version 2, or the variants are not its own.
    """
    manifest = directory / MANIFEST
    if not manifest.is_file():
        raise PackError(MANIFEST, f"does not exist in {directory}: an unversioned directory has nowhere to name them")
    before = manifest.read_text(encoding="utf-8")
    _replace(manifest, json.dumps({**_read_json(manifest), "variants": variants}, indent=2))
    try:
        pack = load_pack(directory)
        pack.verify()
    except PackError:
        _replace(manifest, before.rstrip("\n"))
        raise
    return pack


def replace_calibration(pack: ModelPack, calibration: Mapping[str, Any]) -> ModelPack:
    """Give a pack another calibration; read it back. Whoever loads the pack meanwhile gets the old or the new one.

    Raises:
        PackError: the calibration is of another recogniser, or the directory cannot be written to; the pack is as it
            was.
    """
    measured = calibration.get("recogniser")
    if measured != pack.recognition.fingerprint():
        raise PackError("calibration", "was measured with another recogniser")
    manifest = pack.directory / MANIFEST
    document = _read_json(manifest) if manifest.is_file() else {}
    try:
        _replace(pack.directory / CALIBRATION, json.dumps(calibration))
        if document.get("manifest_version") == MANIFEST_VERSION and document.get("calibration") != CALIBRATION:
            _replace(manifest, json.dumps({**document, "calibration": CALIBRATION}, indent=2))
    except OSError as error:
        raise PackError("calibration", f"cannot be written into {pack.directory} ({error.strerror})") from error
    return load_pack(pack.directory)


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)

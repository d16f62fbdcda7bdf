"""Settings of a training run: validated dataclasses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from models.vision.alignment import CROP_SIZE_PX

MAX_CROP_PX: Final = 512
CROP_STEP_PX: Final = 16
"""Networks halve the sides four times."""
BackboneName = Literal[
    "thin_iresnet",
    "iresnet18",
    "iresnet34",
    "iresnet50",
    "iresnet100",
    "iresnet200",
    "mobilefacenet",
    "vit_s",
    "vit_b",
]
Optimizer = Literal["sgd", "adamw"]
Schedule = Literal["cosine", "poly", "step"]
TrainingPrecision = Literal["auto", "fp32", "bf16", "fp16"]
Option = float | int | bool | str


class ConfigError(ValueError):
    """Invalid setting or input. The message names it and a remedy."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _one_of(value: str, kind: Any, name: str) -> None:
    _require(value in get_args(kind), f"{name} {value!r} is not one of {', '.join(get_args(kind))}")


class _Section:
    """Base of all sections: unknown keys are errors."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class DataConfig(_Section):
    """Identities: a manifest CSV (``file``, ``identity``), a folder with one folder per person, an MXNet record file
    (``train.rec`` with ``train.idx`` beside it), or a folder of WebDataset shards (``*.tar`` with ``.jpg`` and
    ``.cls``)."""

    root: Path
    manifest: str | None = "manifest.csv"
    """Path within ``root``; None reads one folder per person. Record files ignore it."""
    aligned: bool = True
    """Images are crops on the five-point template; otherwise faces are detected and aligned first."""
    crop_px: int = CROP_SIZE_PX
    """Side of the crops, in pixels, and of the network's input. The template scales with it."""
    min_images: int = 2
    max_identities: int | None = None
    images_per_person: int = 0
    """0: every image once per epoch. k: identity-balanced batches, k images of each of batch_size / k people."""
    person_folders: int = 1
    """Folders below ``root`` that name a person: 2 for ``a1/a2/photo``, the layout of MegaFace's distractors."""
    exclude: Path | None = None
    """Text file with photos to leave out, a line each, relative to ``root`` or by name alone: a refined list of a noisy
    set. Lines that begin with # are comments."""
    held_out_people: float = 0.05
    """Share of people who are not trained on. The network is measured on them after every epoch; 0: none."""
    held_out_photos: float = 0.05
    """Share of photos of the trained people that are not trained on, but measured. Two photos of a person are
    always trained on."""
    workers: int = 0
    """Processes that decode crops while a run trains, for sets that exceed the disk as pixels. 0: all crops are decoded
    once, into a cache."""

    def __post_init__(self) -> None:
        records = self.root.suffix == ".rec"
        _require(self.root.is_file() if records else self.root.is_dir(), f"data.root {self.root} does not exist")
        _require(self.min_images >= 1, "data.min_images must be at least 1")
        _require(
            0 < self.crop_px <= MAX_CROP_PX, f"data.crop_px must be a side up to {MAX_CROP_PX}, not {self.crop_px}"
        )
        _require(self.person_folders >= 1, "data.person_folders must be at least 1")
        _require(self.max_identities is None or self.max_identities >= 2, "data.max_identities must be at least 2")
        _require(self.images_per_person >= 0, "data.images_per_person must be 0 (off) or the number of images")
        _require(self.exclude is None or self.exclude.is_file(), f"data.exclude {self.exclude} does not exist")
        _require(self.workers >= 0, "data.workers must be a number of processes, or 0")
        for name in ("held_out_people", "held_out_photos"):
            _require(0 <= getattr(self, name) <= 0.5, f"data.{name} must be a share in [0, 0.5], 0 for none")
        _require(self.aligned or not self.workers, "data.workers streams aligned crops only. Align the photos first")


@dataclass(frozen=True)
class AugmentConfig(_Section):
    """Augmentation settings: probabilities in [0, 1] unless a unit is given."""

    flip: float = 0.5
    move: float = 0.5
    """Probability of a random shift, zoom and rotation within the next three limits."""
    shift: float = 0.035
    """Share of the side."""
    zoom: float = 0.06
    rotation_deg: float = 0.0
    low_resolution: float = 0.2
    """Probability of shrinking to 28, 40 or 56 pixels and enlarging again."""
    gray: float = 0.1
    brightness: float = 0.2
    """Maximum shift, in units of half the range."""
    contrast: float = 0.25
    saturation: float = 0.0
    erase: float = 0.15
    mask: float = 0.0
    """Probability of a synthetic face mask over nose, mouth and chin."""

    def __post_init__(self) -> None:
        for name in ("flip", "move", "low_resolution", "gray", "erase", "mask"):
            _require(0 <= getattr(self, name) <= 1, f"augment.{name} must be a probability, not {getattr(self, name)}")
        for name in ("shift", "zoom", "brightness", "contrast", "saturation"):
            _require(0 <= getattr(self, name) < 1, f"augment.{name} must be in [0, 1), not {getattr(self, name)}")
        _require(0 <= self.rotation_deg <= 45, f"augment.rotation_deg must be in [0, 45], not {self.rotation_deg}")


@dataclass(frozen=True)
class BackboneConfig(_Section):
    name: BackboneName = "thin_iresnet"
    embedding_dim: int = 256
    dropout: float = 0.0
    """Dropout of the IResNet head (BN-Dropout-FC-BN); 0.4 in the papers."""
    drop_path: float = 0.0
    """Stochastic depth of IResNets and ViTs: share of images for which the last block is skipped."""
    widths: tuple[int, int, int] = (48, 96, 192)
    """Channels of the stages of the thin IResNet; ``depths`` and ``stem`` also apply to it only."""
    depths: tuple[int, int, int] = (1, 2, 2)
    stem: int = 16

    def __post_init__(self) -> None:
        _one_of(self.name, BackboneName, "backbone.name")
        _require(self.embedding_dim >= 2, "backbone.embedding_dim must be at least 2")
        _require(0 <= self.dropout < 1, f"backbone.dropout must be in [0, 1), not {self.dropout}")
        _require(0 <= self.drop_path < 1, f"backbone.drop_path must be in [0, 1), not {self.drop_path}")
        _require(
            not self.drop_path or self.name.startswith(("iresnet", "vit")),
            f"backbone.drop_path: {self.name} has no stochastic depth",
        )
        _require(not self.dropout or self.name.startswith("iresnet"), f"backbone.dropout: {self.name} has no dropout")
        # torch 2.13's channels-last backward pass corrupts memory for 4 channels on CPUs without AVX-512, and for a
        # stem of 8 with it.
        channels = (*self.widths, self.stem)
        valid = all(c >= 16 and c % 8 == 0 for c in channels)
        _require(valid, "backbone.widths and stem must be multiples of 8, at least 16")


@dataclass(frozen=True)
class HeadConfig(_Section):
    """Head of ``training.losses.HEADS`` and its options, such as ``scale`` and ``margin``."""

    name: str = "cosface"
    options: Mapping[str, Option] = field(default_factory=dict)


@dataclass(frozen=True)
class TermConfig(_Section):
    """Term of ``training.losses.TERMS``, its weight and its options."""

    name: str
    weight: float = 1.0
    options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.weight > 0, f"terms.{self.name} needs a positive weight, not {self.weight}")


@dataclass(frozen=True)
class DistillConfig(_Section):
    """Distillation: learn a teacher's embeddings of the student's images, beside the labels."""

    teacher: Path | None = None
    """A pack, a directory or file of ONNX, a .pt2 file of torch.export, or a finished run."""
    weight: float = 1.0
    mirror: bool = False
    """Teach the mean of the teacher's embeddings of the image and its mirror image, which is better than either."""
    held_out: int = 0
    """Number of images that are not trained on. Their distillation loss is logged after every epoch."""

    def __post_init__(self) -> None:
        _require(self.teacher is None or self.teacher.exists(), f"distill.teacher {self.teacher} does not exist")
        _require(self.weight > 0, "distill.weight must be positive")
        _require(self.held_out >= 0, "distill.held_out must be a number of images, or 0")
        for name in ("mirror", "held_out"):
            needed = not getattr(self, name) or self.teacher is not None
            _require(needed, f"distill.{name} needs a distill.teacher")


@dataclass(frozen=True)
class LoopConfig(_Section):
    epochs: int = 8
    batch_size: int = 128
    """Size of the global batch, over all ranks."""
    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    """Momentum of SGD; first beta of AdamW."""
    weight_decay: float = 5e-4
    schedule: Schedule = "cosine"
    poly_power: float = 2.0
    milestones: tuple[float, ...] = (0.625, 0.875)
    """Shares of the run after which the schedule ``step`` divides the rate by ten. ArcFace on CASIA: 20,000
    and 28,000 of 32,000 steps."""
    warmup: float = 0.05
    """Share of the run over which the rate rises."""
    margin_warmup: float = 0.0
    """Share of the run over which the margin of a head grows linearly from 0. A full margin can stall the first
    epochs."""
    gradient_clip: float = 5.0
    """Largest gradient norm of the backbone, and that of head and terms, each on its own; 0: no limit."""
    accumulate: int = 1
    """Parts into which each rank splits its batch, to save memory. Statistics of batch norms, heads and terms are those
    of a part."""
    ema_decay: float = 0.999
    precision: TrainingPrecision = "auto"
    compile: bool = False
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    sync_batch_norm: bool = False
    """Compute batch-norm statistics over the global batch, on GPUs: all ranks wait for each other at every layer."""
    class_sampling: float = 0.0
    """Partial FC. 0: every rank holds the whole classifier. Otherwise each rank holds a share of the classes and each
    step uses this fraction of them (1.0: all), always including those of the batch."""
    interclass_filter: float = 0.0
    """Cosine above which another class is ignored for an image: both may be one person. 0: off."""
    sharded_checkpoint: bool = False
    """Let every rank of Partial FC write its classes beside the checkpoint, instead of sending them to the first."""
    checkpoint_seconds: float = 120.0
    seed: int = 7

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, "loop.epochs must be at least 1")
        _require(self.batch_size >= 2, "loop.batch_size must be at least 2, for batch norm")
        _require(self.learning_rate > 0, "loop.learning_rate must be positive")
        _require(0 <= self.momentum < 1, "loop.momentum must be in [0, 1)")
        _require(self.gradient_clip >= 0, "loop.gradient_clip must not be negative")
        _require(self.accumulate >= 1, "loop.accumulate must be at least 1")
        _require(all(0 < m < 1 for m in self.milestones), "loop.milestones must be shares of the run, in (0, 1)")
        _require(0 <= self.ema_decay < 1, "loop.ema_decay must be in [0, 1)")
        _require(0 <= self.interclass_filter < 1, "loop.interclass_filter must be a cosine in [0, 1)")
        _require(0 <= self.class_sampling <= 1, "loop.class_sampling must be in [0, 1]")
        for name in ("warmup", "margin_warmup"):
            _require(0 <= getattr(self, name) < 1, f"loop.{name} must be a share of the run, in [0, 1)")
        for name in ("weight_decay", "seed"):
            _require(getattr(self, name) >= 0, f"loop.{name} must not be negative")
        _one_of(self.optimizer, Optimizer, "loop.optimizer")
        _one_of(self.schedule, Schedule, "loop.schedule")
        _one_of(self.precision, TrainingPrecision, "loop.precision")


@dataclass(frozen=True)
class RunConfig(_Section):
    name: str
    output: Path
    data: DataConfig
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    terms: tuple[TermConfig, ...] = ()
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    validation: tuple[Path, ...] = ()
    """LFW-style .bin sets, evaluated after every epoch."""

    def __post_init__(self) -> None:
        k = self.data.images_per_person
        _require(not k or self.loop.batch_size % k == 0, f"loop.batch_size must be a multiple of {k} images_per_person")
        side = self.data.crop_px
        _require(
            side % CROP_STEP_PX == 0, f"data.crop_px must be a multiple of {CROP_STEP_PX} for a network, not {side}"
        )
        for path in self.validation:
            _require(path.is_file(), f"validation set {path} does not exist")

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return document

    def shareable(self) -> dict[str, Any]:
        """Return a JSON-ready copy without local paths, for packs and model cards."""
        document = self.as_dict()
        del document["output"]
        document["data"]["root"] = self.data.root.name
        document["validation"] = [path.name for path in self.validation]
        if self.data.exclude is not None:
            document["data"]["exclude"] = self.data.exclude.name
        if self.distill.teacher is not None:
            document["distill"]["teacher"] = self.distill.teacher.name
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> RunConfig:
        """Build from the result of `as_dict`. Raises ConfigError on an unknown key or invalid value."""
        try:
            return TypeAdapter(cls).validate_python(document)
        except ValidationError as error:
            problems = (
                f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
            )
            raise ConfigError("; ".join(problems)) from error

    def overridden(self, settings: Mapping[str, str]) -> RunConfig:
        """Return a copy with settings replaced by text.

        Keys: ``loop.epochs``, ``head.name``, ``head.margin`` (option of the head), ``terms.intra`` (weight of the term,
        0 removes it), ``terms.intra.margin`` (option of the term). Raises ConfigError on an unknown setting or invalid
        value.
        """
        document = self.as_dict()
        # Apply head.name first: it resets the options of the old head.
        for key in sorted(settings, key=lambda key: key != "head.name"):
            _override(document, key, settings[key])
        return RunConfig.from_dict(document)


def _override(document: dict[str, Any], key: str, text: str) -> None:
    section, _, rest = key.partition(".")
    if section == "terms" and rest:
        name, _, option = rest.partition(".")
        term = next((t for t in document["terms"] if t["name"] == name), None)
        if term is None:
            term = {"name": name, "weight": 1.0, "options": {}}
            document["terms"].append(term)
        if option:
            term["options"][option] = _value(text)
        elif _value(text) == 0:
            document["terms"].remove(term)
        else:
            term["weight"] = _value(text)
    elif section == "head" and rest not in ("", "name"):
        document["head"]["options"][rest] = _value(text)
    elif key == "name":
        document["name"] = text
    elif key == "validation":
        document["validation"] = text.split(",") if text else []
    elif isinstance(document.get(section), dict) and rest in document[section]:
        document[section][rest] = _value(text)
        if (section, rest) == ("head", "name"):
            document["head"]["options"] = {}
    else:
        sections = ("data", "backbone", "augment", "distill", "loop")
        known = ["name", "head.name", "head.OPTION", "terms.NAME", "terms.NAME.OPTION", "validation"]
        known += [f"{name}.{option}" for name in sections for option in document[name]]
        raise ConfigError(f"unknown setting {key!r}. Settings: {', '.join(known)}")


def _value(text: str) -> Any:
    """Parse numbers, booleans, null and lists as JSON; anything else is text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text

"""What one training run is: plain dataclasses that refuse bad values and say what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

BackboneName = Literal["thin_iresnet", "iresnet18", "iresnet34", "iresnet50", "iresnet100", "mobilefacenet"]
Optimiser = Literal["sgd", "adamw"]
Schedule = Literal["cosine", "poly"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Match = Literal["cosine", "euclidean"]
Option = float | int | bool | str


class ConfigError(ValueError):
    """A setting that no run could use; the message names it and says what would do."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _one_of(value: str, kind: Any, name: str) -> None:
    _require(value in get_args(kind), f"{name} {value!r} is not one of {', '.join(get_args(kind))}")


class _Section:
    """An unknown key is an error, not a silence."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class DataConfig(_Section):
    """Identities to learn from: a manifest CSV (``file``, ``identity``), a folder with one folder per person, or an
    MXNet record file (``train.rec`` with ``train.idx`` beside it)."""

    root: Path
    manifest: str | None = "manifest.csv"
    """Inside ``root``; None reads one folder per person. A record file needs neither."""
    aligned: bool = True
    """Files are 112x112 crops on the five-point template; otherwise they are detected and aligned first."""
    min_images: int = 2
    max_identities: int | None = None
    images_per_person: int = 0
    """0: every image once an epoch. k: identity-balanced batches, k images of each of batch_size / k people."""
    sharp_repeats: int = 1
    """How often an epoch shows images whose source had the eyes ``sharp_eyes_px`` apart or more (the manifest's column
    ``eye_distance_px``): probes are sharper than a set that was mostly enlarged."""
    sharp_eyes_px: float = 18.0

    def __post_init__(self) -> None:
        records = self.root.suffix == ".rec"
        _require(self.root.is_file() if records else self.root.is_dir(), f"data.root {self.root} does not exist")
        _require(self.min_images >= 1, "data.min_images must be at least 1")
        _require(self.max_identities is None or self.max_identities >= 2, "data.max_identities must be at least 2")
        _require(self.images_per_person >= 0, "data.images_per_person must be 0 (off) or the number of images")
        _require(self.sharp_repeats >= 1, "data.sharp_repeats must be at least 1")
        _require(
            self.sharp_repeats == 1 or (self.manifest is not None and not records and not self.images_per_person),
            "data.sharp_repeats needs a manifest, and batches that are not balanced (data.images_per_person 0)",
        )


@dataclass(frozen=True)
class AugmentConfig(_Section):
    """How batches are varied. Probabilities in [0, 1] unless a unit is named."""

    flip: float = 0.5
    move: float = 0.5
    """Probability of a random shift, zoom and rotation; the next three bound them."""
    shift: float = 0.035
    """Share of the side."""
    zoom: float = 0.06
    rotation_deg: float = 0.0
    low_resolution: float = 0.2
    """Shrunk to 28, 40 or 56 pixels and enlarged again."""
    grey: float = 0.1
    brightness: float = 0.2
    """Largest shift, in units of half the range."""
    contrast: float = 0.25
    saturation: float = 0.0
    erase: float = 0.15
    mask: float = 0.0
    """A synthetic face mask over nose, mouth and chin."""
    morph: float = 0.0
    """Blend two people's faces by a smooth mask. Only a teacher can say who that is: labels do not count for these."""

    def __post_init__(self) -> None:
        for name in ("flip", "move", "low_resolution", "grey", "erase", "mask", "morph"):
            _require(0 <= getattr(self, name) <= 1, f"augment.{name} is a probability, not {getattr(self, name)}")
        for name in ("shift", "zoom", "brightness", "contrast", "saturation"):
            _require(0 <= getattr(self, name) < 1, f"augment.{name} lies in [0, 1), not {getattr(self, name)}")
        _require(0 <= self.rotation_deg <= 45, f"augment.rotation_deg lies in [0, 45], not {self.rotation_deg}")


@dataclass(frozen=True)
class BackboneConfig(_Section):
    name: BackboneName = "thin_iresnet"
    embedding_dim: int = 256
    dropout: float = 0.0
    """Of the IResNet head (BN-Dropout-FC-BN); the papers' is 0.4."""
    widths: tuple[int, int, int] = (48, 96, 192)
    """Of the thin IResNet's stages, as are the next two."""
    depths: tuple[int, int, int] = (1, 2, 2)
    stem: int = 16

    def __post_init__(self) -> None:
        _one_of(self.name, BackboneName, "backbone.name")
        _require(self.embedding_dim >= 2, "backbone.embedding_dim must be at least 2")
        _require(0 <= self.dropout < 1, f"backbone.dropout lies in [0, 1), not {self.dropout}")
        _require(not self.dropout or self.name.startswith("iresnet"), f"backbone.dropout: {self.name} has no dropout")
        # torch 2.13's channels-last backward pass corrupts memory in layers of 4 channels on processors without
        # AVX-512, and in a stem of 8 on those with it.
        channels = (*self.widths, self.stem)
        fine = all(c >= 16 and c % 8 == 0 for c in channels)
        _require(fine, "backbone.widths and stem must be multiples of 8, from 16 on")


@dataclass(frozen=True)
class HeadConfig(_Section):
    """A head of ``training.losses.HEADS`` and what its constructor is given: ``scale``, ``margin``..."""

    name: str = "cosface"
    options: Mapping[str, Option] = field(default_factory=dict)


@dataclass(frozen=True)
class TermConfig(_Section):
    """A loss of ``training.losses.TERMS`` added to the head's, and by how much."""

    name: str
    weight: float = 1.0
    options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.weight > 0, f"terms.{self.name} needs a positive weight, not {self.weight}")


@dataclass(frozen=True)
class DistillConfig(_Section):
    """Learn a teacher's embeddings beside the labels, from the very images that the student sees."""

    teacher: Path | None = None
    """A pack, a directory or file of ONNX, a .pt2 of torch.export, or a finished run."""
    weight: float = 1.0
    match: Match = "cosine"
    """cosine: the mean of 1 - cos(student, teacher). euclidean: the mean square of student - scale * teacher, unit
    vectors both of the teacher's; for a teacher whose vectors all lie near one direction."""
    scale: float = 1.0
    """Of euclidean: what gives the teacher's coordinates a standard deviation near 1."""
    views: int = 0
    """Batches recur, image for image, after this many epochs, so that the teacher is asked but once for each; 0: they
    never do."""

    def __post_init__(self) -> None:
        _require(self.teacher is None or self.teacher.exists(), f"distill.teacher {self.teacher} does not exist")
        _require(self.weight > 0, "distill.weight must be positive")
        _require(self.scale > 0, "distill.scale must be positive")
        _require(self.views >= 0, "distill.views must be a number of epochs, or 0")
        _require(not self.views or self.teacher is not None, "distill.views needs a distill.teacher")
        _one_of(self.match, Match, "distill.match")


@dataclass(frozen=True)
class LoopConfig(_Section):
    epochs: int = 8
    batch_size: int = 128
    """Of all ranks together."""
    optimiser: Optimiser = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    """SGD's; AdamW's first beta."""
    weight_decay: float = 5e-4
    schedule: Schedule = "cosine"
    poly_power: float = 2.0
    warmup_steps: int = 300
    margin_warmup_steps: int = 0
    """Steps over which the margin of a cosine head grows linearly from 0; from scratch a full margin can stall the
    first epochs. l_softmax and a_softmax ease theirs in by a rule of their own."""
    gradient_clip: float = 5.0
    ema_decay: float = 0.999
    precision: Precision = "auto"
    compile: bool = False
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    sync_batch_norm: bool = True
    """Batch-norm statistics over all ranks' images."""
    class_sampling: float = 0.0
    """Partial FC: 0 keeps the whole classifier on every rank; otherwise each rank holds a share of the classes and
    each step uses this fraction of them (1.0: all), those of the batch always among them."""
    checkpoint_seconds: float = 120.0
    seed: int = 7

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, "loop.epochs must be at least 1")
        _require(self.batch_size >= 2, "loop.batch_size must be at least 2: batch norm needs company")
        _require(self.learning_rate > 0, "loop.learning_rate must be positive")
        _require(0 <= self.momentum < 1, "loop.momentum lies in [0, 1)")
        _require(self.gradient_clip > 0, "loop.gradient_clip must be positive")
        _require(0 <= self.ema_decay < 1, "loop.ema_decay lies in [0, 1)")
        _require(0 <= self.class_sampling <= 1, "loop.class_sampling lies in [0, 1]")
        for name in ("warmup_steps", "margin_warmup_steps", "weight_decay", "seed"):
            _require(getattr(self, name) >= 0, f"loop.{name} must not be negative")
        _one_of(self.optimiser, Optimiser, "loop.optimiser")
        _one_of(self.schedule, Schedule, "loop.schedule")
        _one_of(self.precision, Precision, "loop.precision")


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
    """LFW-style .bin sets that are judged after every epoch."""

    def __post_init__(self) -> None:
        k = self.data.images_per_person
        _require(not k or self.loop.batch_size % k == 0, f"loop.batch_size must be a multiple of {k} images_per_person")
        _require(
            not self.augment.morph or self.distill.teacher is not None,
            "augment.morph needs a distill.teacher: a blend of two people has no label",
        )
        _require(
            not (self.augment.morph and self.loop.class_sampling),
            "augment.morph leaves ranks unequal numbers of labels, which loop.class_sampling cannot deal with",
        )
        _require(self.augment.morph < 1 or self.head.name == "none", "augment.morph = 1 leaves a head without labels")
        for path in self.validation:
            _require(path.is_file(), f"validation set {path} does not exist")

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy, for checkpoints, packs and reports."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return document

    def shareable(self) -> dict[str, Any]:
        """For packs and cards: where things lay is nobody's business; what they were is."""
        document = self.as_dict()
        del document["output"]
        document["data"]["root"] = self.data.root.name
        document["validation"] = [path.name for path in self.validation]
        if self.distill.teacher is not None:
            document["distill"]["teacher"] = self.distill.teacher.name
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> RunConfig:
        """The inverse of :meth:`as_dict`.

        Raises:
            ConfigError: a key is unknown or a value cannot be used.
        """
        try:
            return TypeAdapter(cls).validate_python(document)
        except ValidationError as error:
            problems = (
                f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
            )
            raise ConfigError("; ".join(problems)) from error

    def overridden(self, settings: Mapping[str, str]) -> RunConfig:
        """A copy with ``section.key`` = text replaced: ``loop.epochs``, ``head.name``, ``head.margin`` (an option of
        the head), ``terms.intra`` (that term's weight, 0 to drop it), ``terms.intra.margin`` (its option).

        Raises:
            ConfigError: there is no such setting, or the text is no value for it.
        """
        document = self.as_dict()
        # Another head first: it comes without the old one's options, and with those that are named beside it.
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
        raise ConfigError(f"there is no setting {key!r}; known are {', '.join(known)}")


def _value(text: str) -> Any:
    """Numbers, booleans, null and lists as in JSON; anything else is text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text

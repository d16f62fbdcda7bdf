"""Settings of a training run: validated dataclasses."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from functools import wraps
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field, FilePath, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

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
Count = Annotated[int, Field(ge=0)]
Ordinal = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
HeldOut = Annotated[float, Field(ge=0, le=0.5)]
Channels = Annotated[int, Field(ge=16, multiple_of=8)]
"""torch 2.13's channels-last backward pass corrupts memory for 4 channels on CPUs without AVX-512, and for a stem of 8
with it."""
T = TypeVar("T")


class ConfigError(ValueError):
    """Invalid setting or input. The message names it and a remedy."""


def _explain(error: ValidationError, section: str = "") -> ConfigError:
    """Return the error that names each invalid setting, below ``section``, what is allowed and what was given."""
    problems = []
    for found in error.errors():
        name = ".".join(map(str, (section, *found["loc"]) if section else found["loc"]))
        given = f", not {found['input']}" if isinstance(found["input"], str | int | float | Path) else ""
        problems.append(f"{name}: {found['msg'].removeprefix('Value error, ')}{given}")
    return ConfigError("; ".join(problems))


@dataclass_transform(frozen_default=True, field_specifiers=(field, Field))
def _section(cls: type[T]) -> type[T]:
    """Return a frozen dataclass that validates its fields. Unknown keys and invalid values raise ConfigError."""
    made = cast(type[T], dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls))
    plain = made.__init__
    section = cls.__name__.removesuffix("Config").lower()

    @wraps(plain)
    def checked(self: T, *values: Any, **named: Any) -> None:
        try:
            plain(self, *values, **named)
        except ValidationError as error:
            raise _explain(error, section) from error

    made.__init__ = checked  # type: ignore[method-assign,assignment]
    return made


@_section
class DataConfig:
    """Identities: a manifest CSV (``file``, ``identity``), a folder with one folder per person, an MXNet record file
    (``train.rec`` with ``train.idx`` beside it), or a folder of WebDataset shards (``*.tar`` with ``.jpg`` and
    ``.cls``)."""

    root: Path
    manifest: str | None = "manifest.csv"
    """Path within ``root``; None reads one folder per person. Record files ignore it."""
    aligned: bool = True
    """Images are crops on the five-point template; otherwise faces are detected and aligned first."""
    crop_px: Annotated[int, Field(ge=1, le=MAX_CROP_PX)] = CROP_SIZE_PX
    """Side of the crops, in pixels, and of the network's input. The template scales with it."""
    min_images: Ordinal = 2
    max_identities: Annotated[int, Field(ge=2)] | None = None
    images_per_person: Count = 0
    """0: every image once per epoch. k: identity-balanced batches, k images of each of batch_size / k people."""
    person_folders: Ordinal = 1
    """Folders below ``root`` that name a person: 2 for ``a1/a2/photo``, the layout of MegaFace's distractors."""
    exclude: FilePath | None = None
    """Text file with photos to leave out, a line each, relative to ``root`` or by name alone: a refined list of a noisy
    set. Lines that begin with # are comments."""
    held_out_people: HeldOut = 0.05
    """Share of people who are not trained on, at most 50. The network is measured on them each epoch; 0: none."""
    held_out_photos: HeldOut = 0.05
    """Share of photos of the trained people that are not trained on, but measured, about 1,000 at most. Two photos of a
    person are always trained on."""
    workers: Count = 0
    """Threads that decode crops while a run trains, for sets that exceed the disk as pixels. 0: all crops are decoded
    once, into a cache."""

    def __post_init__(self) -> None:
        if not (self.root.is_file() if self.root.suffix == ".rec" else self.root.is_dir()):
            raise ConfigError(f"data.root {self.root} does not exist")
        if self.workers and not self.aligned:
            raise ConfigError("data.workers streams aligned crops only. Align the photos first")


@_section
class AugmentConfig:
    """Augmentation settings: probabilities in [0, 1] unless a unit is given."""

    flip: Probability = 0.5
    move: Probability = 0.5
    """Probability of a random shift, zoom and rotation within the next three limits."""
    shift: Share = 0.035
    """Share of the side."""
    zoom: Share = 0.06
    rotation_deg: Annotated[float, Field(ge=0, le=45)] = 0.0
    low_resolution: Probability = 0.2
    """Probability of shrinking to 28, 40 or 56 pixels and enlarging again."""
    gray: Probability = 0.1
    brightness: Share = 0.2
    """Maximum shift, in units of half the range."""
    contrast: Share = 0.25
    erase: Probability = 0.15
    mask: Probability = 0.0
    """Probability of a synthetic face mask over nose, mouth and chin."""


@_section
class BackboneConfig:
    name: BackboneName = "thin_iresnet"
    embedding_dim: Annotated[int, Field(ge=2)] = 256
    dropout: Share = 0.0
    """Dropout of the IResNet head (BN-Dropout-FC-BN); 0.4 in the papers."""
    drop_path: Share = 0.0
    """Stochastic depth of IResNets and ViTs: share of images for which the last block is skipped."""
    widths: tuple[Channels, Channels, Channels] = (48, 96, 192)
    """Channels of the stages of the thin IResNet; ``depths`` and ``stem`` also apply to it only."""
    depths: tuple[Ordinal, Ordinal, Ordinal] = (1, 2, 2)
    stem: Channels = 16
    width: Ordinal = 1
    """Factor of MobileFaceNet's channels between the blocks; 2 in arcface_torch."""
    weights: Path | None = None
    """Run, such as imported weights, from whose network and class centers a new run starts."""

    def __post_init__(self) -> None:
        if self.drop_path and not self.name.startswith(("iresnet", "vit")):
            raise ConfigError(f"backbone.drop_path: {self.name} has no stochastic depth")
        if self.dropout and not self.name.startswith("iresnet"):
            raise ConfigError(f"backbone.dropout: {self.name} has no dropout")
        if self.width > 1 and self.name != "mobilefacenet":
            raise ConfigError(f"backbone.width: {self.name} has no such factor")


@_section
class HeadConfig:
    """Head of ``training.losses.HEADS`` and its options, such as ``scale`` and ``margin``."""

    name: str = "cosface"
    options: Mapping[str, Option] = field(default_factory=dict)


@_section
class TermConfig:
    """Term of ``training.losses.TERMS``, its weight and its options."""

    name: str
    weight: Positive = 1.0
    options: Mapping[str, Option] = field(default_factory=dict)


@_section
class DistillConfig:
    """Distillation: learn a teacher's embeddings of the images, beside the labels.

    They are computed once, of the images and their mirror images without augmentation.
    """

    teacher: Path | None = None
    """A pack, a directory or file of ONNX, a .pt2 file of torch.export, or a finished run."""
    weight: Positive = 1.0

    def __post_init__(self) -> None:
        if self.teacher is not None and not self.teacher.exists():
            raise ConfigError(f"distill.teacher {self.teacher} does not exist")


@_section
class LoopConfig:
    epochs: Ordinal = 8
    batch_size: Annotated[int, Field(ge=2)] = 128
    """Size of the global batch, over all ranks. Batch norm needs two images."""
    optimizer: Optimizer = "sgd"
    learning_rate: Positive = 0.1
    momentum: Share = 0.9
    """Momentum of SGD; first beta of AdamW."""
    weight_decay: NotNegative = 5e-4
    schedule: Schedule = "cosine"
    poly_power: float = 2.0
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.625, 0.875)
    """Shares of the run after which the schedule ``step`` divides the rate by ten. ArcFace on CASIA: 20,000
    and 28,000 of 32,000 steps."""
    warmup: Share = 0.05
    """Share of the run over which the rate rises."""
    margin_warmup: Share = 0.0
    """Share of the run over which the margin of a head grows linearly from 0. A full margin can stall the first
    epochs."""
    gradient_clip: NotNegative = 5.0
    """Largest gradient norm of the backbone, and that of head and terms, each on its own; 0: no limit."""
    accumulate: Ordinal = 1
    """Parts into which each rank splits its batch, to save memory. Statistics of batch norms, heads and terms are those
    of a part."""
    ema_decay: Share = 0.999
    precision: TrainingPrecision = "auto"
    compile: bool = False
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    sync_batch_norm: bool = False
    """Compute batch-norm statistics over the global batch, on GPUs: all ranks wait for each other at every layer."""
    class_sampling: Probability = 0.0
    """Partial FC. 0: every rank holds the whole classifier. Otherwise each rank holds a share of the classes and each
    step uses this fraction of them (1.0: all), always including those of the batch."""
    interclass_filter: Share = 0.0
    """Cosine above which another class is ignored for an image: both may be one person. 0: off."""
    sharded_checkpoint: bool = False
    """Let every rank of Partial FC write its classes beside the checkpoint, instead of sending them to the first."""
    checkpoint_seconds: float = 120.0
    wandb: str = ""
    """Project of Weights & Biases to log to, beside TensorBoard; needs the package wandb. Empty: none."""
    seed: Count = 7


@_section
class RunConfig:
    name: str
    output: Path
    data: DataConfig
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    terms: tuple[TermConfig, ...] = ()
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    validation: tuple[FilePath, ...] = ()
    """LFW-style .bin sets, evaluated after every epoch."""
    imported: bool = False
    """Weights of another trainer: no photos, no losses."""

    def __post_init__(self) -> None:
        if (k := self.data.images_per_person) and self.loop.batch_size % k:
            raise ConfigError(f"loop.batch_size must be a multiple of {k} images_per_person")
        if (side := self.data.crop_px) % CROP_STEP_PX:
            raise ConfigError(f"data.crop_px must be a multiple of {CROP_STEP_PX} for a network, not {side}")

    def as_dict(self, show: Callable[[Path], str] = str) -> dict[str, Any]:
        """Return a JSON-ready copy. ``show`` writes paths."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self), default=show))
        return document

    def shareable(self) -> dict[str, Any]:
        """Return a JSON-ready copy without local paths, for packs and model cards."""
        document = self.as_dict(attrgetter("name"))
        del document["output"]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> RunConfig:
        """Build from the result of `as_dict`. Raises ConfigError on an unknown key or invalid value."""
        try:
            return TypeAdapter(cls).validate_python(document)
        except ValidationError as error:
            raise _explain(error) from error

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
        raise ConfigError(f"unknown setting {key!r}{_nearest(key, known)}")


def _nearest(key: str, known: Sequence[str]) -> str:
    """Return a sentence that names the known key nearest to an unknown one, or where all are listed."""
    last = key.rpartition(".")[2]
    found = difflib.get_close_matches(key, known, 1) or [name for name in known if name.endswith(f".{last}")]
    return f". Did you mean {found[0]}?" if found else ". docs/training.md lists the settings"


def read_settings(path: Path) -> dict[str, str]:
    """Return the settings of a YAML or JSON file as `RunConfig.overridden` takes them. Keys are those of ``--set``, in
    sections (``loop: {epochs: 3}``) or written out (``loop.epochs: 3``). YAML needs the package pyyaml. Raises
    ConfigError if the file cannot be read."""
    text = path.read_text(encoding="utf-8")
    try:
        document = json.loads(text) if path.suffix == ".json" else import_module("yaml").safe_load(text)
    except ImportError as error:
        raise ConfigError(
            f"{path}: YAML needs the package pyyaml. Install it, or write the settings as JSON"
        ) from error
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} has no settings. Write them as section: {{key: value}}")
    return dict(_written(document))


def _written(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _written(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" == "validation":
            yield "validation", ",".join(map(str, value or ()))
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _value(text: str) -> Any:
    """Parse numbers, booleans, null and lists as JSON; anything else is text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text

"""What one training run is: plain dataclasses that refuse bad values and say what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

HeadName = Literal["arcface", "cosface", "normface", "adacos", "adacos_fixed"]
Precision = Literal["auto", "fp32", "bf16"]


class ConfigError(ValueError):
    """A setting that no run could use; the message names it and says what would do."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class DataConfig:
    """Identities to learn from: a manifest CSV (``file``, ``identity``) or a folder with one folder per person."""

    root: Path
    manifest: str | None = "manifest.csv"
    aligned: bool = True
    """Files are 112x112 crops on the five-point template; otherwise they are detected and aligned first."""
    min_images: int = 2
    max_identities: int | None = None

    def __post_init__(self) -> None:
        _require(self.root.is_dir(), f"data.root {self.root} is not a folder")
        _require(self.min_images >= 1, "data.min_images must be at least 1")
        _require(self.max_identities is None or self.max_identities >= 2, "data.max_identities must be at least 2")


@dataclass(frozen=True)
class BackboneConfig:
    embedding_dim: int = 256
    widths: tuple[int, int, int] = (48, 96, 192)
    depths: tuple[int, int, int] = (1, 2, 2)
    stem: int = 16

    def __post_init__(self) -> None:
        _require(self.embedding_dim >= 2, "backbone.embedding_dim must be at least 2")
        # torch 2.13's channels-last backward pass corrupts memory with 4 channels on processors without AVX-512.
        channels = (*self.widths, self.stem)
        _require(all(c >= 8 and c % 8 == 0 for c in channels), "backbone.widths and stem must be multiples of 8")


@dataclass(frozen=True)
class HeadConfig:
    name: HeadName = "cosface"
    scale: float = 64.0
    margin: float = 0.35

    def __post_init__(self) -> None:
        known = ("arcface", "cosface", "normface", "adacos", "adacos_fixed")
        _require(self.name in known, f"head.name {self.name!r} is not one of {', '.join(known)}")
        _require(self.scale > 0, f"head.scale must be positive, not {self.scale}")


@dataclass(frozen=True)
class LoopConfig:
    epochs: int = 8
    batch_size: int = 128
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup_steps: int = 300
    margin_warmup_steps: int = 0
    """Steps over which the margin grows linearly from 0; from scratch a full margin can stall the first epochs."""
    gradient_clip: float = 5.0
    ema_decay: float = 0.999
    precision: Precision = "auto"
    checkpoint_seconds: float = 120.0
    seed: int = 7

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, "loop.epochs must be at least 1")
        _require(self.batch_size >= 2, "loop.batch_size must be at least 2: batch norm needs company")
        _require(self.learning_rate > 0, "loop.learning_rate must be positive")
        _require(0 <= self.ema_decay < 1, "loop.ema_decay lies in [0, 1)")
        _require(self.precision in ("auto", "fp32", "bf16"), "loop.precision is auto, fp32 or bf16")


@dataclass(frozen=True)
class RunConfig:
    name: str
    output: Path
    data: DataConfig
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy, for checkpoints, packs and reports."""
        document: dict[str, Any] = _jsonable(asdict(self))
        return document


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    return str(value) if isinstance(value, Path) else value

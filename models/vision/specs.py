"""Specifications of a pack's networks: files, input preprocessing and outputs.

`models.pack.manifest` reads them from a manifest, whose keys are the aliases, and checks the limits of the fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from models.fields import Number, PositiveInt, Sha256, Share
from models.runtime.network import Engine, read_network
from models.vision.alignment import Alignment

ColorOrder = Literal["RGB", "BGR"]
HeadKind = Literal["scrfd", "yunet"]
MAX_DIMENSION: Final = 65_536
MAX_CLASSES: Final = 1000
File = Annotated[Path, Field(alias="file")]


@dataclass(frozen=True)
class Normalization:
    """Input normalization (pixel - mean) / std of pixels in 0..255, in this color order."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    mean: Number
    std: Annotated[Number, Field(gt=0)]
    color: ColorOrder = "RGB"


Preprocessing = Annotated[Normalization, Field(alias="preprocessing")]


@dataclass(frozen=True)
class Int8File:
    """INT8 file of a network, with embeddings comparable to the main file's.

    Args:
        of: SHA-256 of the main file that it was made from.
        engines: measured loss by engine, with ``accepted``.
    """

    path: File
    sha256: Sha256
    of: Sha256
    engines: Mapping[Engine, Mapping[str, Any]] = field(compare=False)

    def is_accurate(self, engine: Engine) -> bool:
        """Tell whether the measured loss on an engine permits to choose the file automatically."""
        return self.engines.get(engine, {}).get("accepted") is True


@dataclass(frozen=True)
class DetectionSpec:
    """Face detector."""

    path: File
    sha256: Sha256 | None
    normalization: Preprocessing
    head: HeadKind
    int8: Int8File | None = None


@dataclass(frozen=True)
class RecognitionSpec:
    """Face recognizer. ``alignment`` defines its crops, ``dimension`` the length of its embeddings."""

    path: File
    sha256: Sha256 | None
    normalization: Preprocessing
    alignment: Alignment
    dimension: Annotated[PositiveInt, Field(alias="embedding_dimension", le=MAX_DIMENSION)]
    preprocessing_version: str
    int8: Int8File | None = None

    def fingerprint(self) -> str:
        """Return a hash of the network and its preprocessing; embeddings compare only if it is equal.

        The INT8 file is excluded: it counts as the same recognizer.
        """
        digest = hashlib.sha256(read_network(self.path))
        shape = [self.normalization.mean, self.normalization.std, self.normalization.color, self.alignment.size_px]
        digest.update(json.dumps([*shape, self.preprocessing_version]).encode())
        if not self.alignment.is_standard:
            digest.update(json.dumps(self.alignment.template).encode())
        return digest.hexdigest()[:32]

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the network's input in pixels."""
        return self.alignment.size_px, self.alignment.size_px


@dataclass(frozen=True)
class BoxCrops:
    """Crops around a face's box, in one image side by side.

    Attributes:
        size_px: side of each crop.
        face_sizes: side of the photo's part that each shows, in sides of the box.
    """

    size_px: int
    face_sizes: tuple[float, ...]


@dataclass(frozen=True)
class LivenessSpec:
    """Presentation attack detector.

    Args:
        crop: geometry of its crops.
        live_class: index of the logit for live faces; None if the network returns the probability itself.
        threshold: smallest score of a live face, in [0, 1].
        max_outside: largest share of a crop that may lie outside the photo, in [0, 1].
    """

    path: File
    sha256: Sha256 | None
    normalization: Preprocessing
    crop: Alignment | BoxCrops
    live_class: Annotated[int, Field(strict=True, ge=0, lt=MAX_CLASSES)] | None
    threshold: Share
    max_outside: Share
    int8: Int8File | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the network's input in pixels."""
        columns = len(self.crop.face_sizes) if isinstance(self.crop, BoxCrops) else 1
        return self.crop.size_px, self.crop.size_px * columns


NetworkSpec = DetectionSpec | RecognitionSpec | LivenessSpec

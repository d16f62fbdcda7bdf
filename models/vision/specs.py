"""Specifications of a pack's networks: files, input preprocessing and outputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from models.runtime.network import Engine, Precision, read_network
from models.vision.alignment import Alignment

ColorOrder = Literal["RGB", "BGR"]
HeadKind = Literal["scrfd", "yunet"]
MAX_POINTS_LOST: Final = 0.1
"""Largest loss of accuracy or recall, in percentage points, of an automatically chosen precision."""


@dataclass(frozen=True)
class Normalization:
    """Input normalization (pixel - mean) / std of pixels in 0..255, in this color order."""

    mean: float
    std: float
    color: ColorOrder = "RGB"


@dataclass(frozen=True)
class Variant:
    """Network in another precision, with embeddings comparable to the main file's.

    Args:
        path: None if the runtime converts the main file itself.
        sha256: checksum of ``path``.
        of: SHA-256 of the main file that the variant was made from.
        measured: accuracy figures.
    """

    precision: Precision
    path: Path | None
    sha256: str | None
    of: str
    measured: Mapping[str, Any] = field(compare=False)

    def points_lost(self, engine: Engine) -> float | None:
        """Return the percentage points of accuracy lost on an engine, or the largest loss if that is not known.

        The loss is that of LFW View 2, or of WIDER FACE recall if a detector loses more there.
        """
        try:
            return float(self._measured(engine)["points_lost"])
        except (KeyError, TypeError, ValueError):
            return self.measured.get("points_lost")

    def is_accurate(self, engine: Engine) -> bool:
        """Tell whether the measured loss on an engine permits to choose the variant automatically."""
        lost = self.points_lost(engine)
        return lost <= MAX_POINTS_LOST if lost is not None else self._measured(engine).get("accepted") is True

    def describe_loss(self, engine: Engine) -> str:
        """Describe the measured loss on an engine: points of accuracy, or the effect on embeddings or landmarks."""
        if (lost := self.points_lost(engine)) is not None:
            return f"{lost:g} points"
        found = self._measured(engine)
        try:
            if "cosine" in found:
                return f"{1 - found['cosine']['mean']:.4f} of the cosine"
            return f"{found['landmark_shift']['eye_distances']['p95']:.1%} of the eye distance"
        except (KeyError, TypeError, ValueError):
            return "not measured"  # the manifest does not validate these figures

    def _measured(self, engine: Engine) -> Mapping[str, Any]:
        engines = self.measured.get("engines")
        found = engines.get(engine) if isinstance(engines, dict) else None
        return found if isinstance(found, dict) else {}

    def gallery_impact(self, engine: Engine) -> str | None:
        """Describe the change of gallery error rates against fp32 at equal thresholds; None if not measured."""
        try:
            rates = self._measured(engine)["galleries"]
            before, after = rates["fp32, probes fp32"], rates[f"{self.precision}, probes {self.precision}"]
            return (
                f"in galleries TAR {before['tar']:.1%} -> {after['tar']:.1%} at FMR {before['fmr_asked']:.1%}, "
                f"FNIR {before['fnir']:.1%} -> {after['fnir']:.1%} at FPIR {before['fpir_asked']:.0%}"
            )
        except (KeyError, TypeError, ValueError):
            return None  # the manifest does not validate these figures


@dataclass(frozen=True)
class DetectionSpec:
    """Face detector."""

    path: Path
    sha256: str | None
    normalization: Normalization
    head: HeadKind
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class RecognitionSpec:
    """Face recognizer. ``alignment`` defines its crops, ``dimension`` the length of its embeddings."""

    path: Path
    sha256: str | None
    normalization: Normalization
    alignment: Alignment
    dimension: int
    preprocessing_version: str
    variants: tuple[Variant, ...] = ()

    def fingerprint(self) -> str:
        """Return a hash of the network and its preprocessing; embeddings compare only if it is equal.

        Variants are excluded: they count as the same recognizer.
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

    path: Path
    sha256: str | None
    normalization: Normalization
    crop: Alignment | BoxCrops
    live_class: int | None
    threshold: float
    max_outside: float
    variants: tuple[Variant, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the network's input in pixels."""
        columns = len(self.crop.face_sizes) if isinstance(self.crop, BoxCrops) else 1
        return self.crop.size_px, self.crop.size_px * columns


NetworkSpec = DetectionSpec | RecognitionSpec | LivenessSpec

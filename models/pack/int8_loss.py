"""Loss of a network's INT8 file against fp32, on an engine, and its limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.checksums import sha256_of
from models.engines.selection import EngineChoice, EnginePreference, open_with_engine
from models.pack.int8_samples import Crops, People, QuantizationSamples, crop_batches, photo_batches
from models.risk.search_rates import rates_at, search_gallery, threshold_at_fpir
from models.runtime.network import Engine, Float, Network
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector
from models.vision.precision_loss import cosine_loss, detection_shift
from models.vision.recognition import Recognizer
from models.vision.specs import DetectionSpec, NetworkSpec, RecognitionSpec, Variant

MIN_MEAN_COSINE: Final = 0.99
MAX_FNIR_LOST: Final = 0.01
FPIR: Final = 0.01
FMR: Final = 1e-3
MAX_LANDMARK_SHIFT: Final = 0.05
"""Largest 95th percentile of the landmarks' movement, in eye distances."""
MAX_FACES_LOST: Final = 0.01
SEARCH_CROPS: Final = 48
SEARCH_PHOTOS: Final = 48
EMBED_ROWS: Final = 64
Measured = dict[str, Any]


def describe_loss(measured: Measured) -> str:
    """Describe the loss of one network on one engine."""
    if "cosine" not in measured:
        shift = measured["landmark_shift"]
        moved = shift.get("eye_distances", {}).get("p95", 0.0)
        overlap = shift.get("box_iou", {}).get("median", 0.0)
        lost = f"{shift['lost']} of {shift['faces']} faces lost"
        return f"landmarks move by at most {moved:.1%} of the eye distance in 95 %, box IoU {overlap:.3f}, {lost}"
    cosine = measured["cosine"]
    text = f"cosine to fp32 {cosine['mean']:.4f}, at worst {cosine['worst']:.4f}"
    for name, rates in measured.get("galleries", {}).items():
        text += f"; {name}: FNIR {rates['fnir']:.1%} at FPIR {rates['fpir']:.1%}"
    return text


class Judge(ABC):
    """Judge of the loss of an INT8 file against the fp32 network."""

    def __init__(self, spec: NetworkSpec) -> None:
        self.spec = spec

    @abstractmethod
    def batches(self) -> Iterator[Float]:
        """Yield the inputs that set the ranges."""

    @abstractmethod
    def measure(self, file: Path, engine: Engine, few: bool = False) -> Measured:
        """Return the loss on an engine, with ``accepted``; on fewer faces if ``few``."""

    @abstractmethod
    def excess(self, measured: Measured) -> float:
        """Return the loss in units of its limit."""

    def open(self, file: Path, engine: Engine) -> Network:
        int8 = replace(self.spec, variants=(Variant("int8", file, None, sha256_of(self.spec.path), {}),))
        return open_with_engine(int8, EngineChoice(engine, "int8", ""), EnginePreference())


class RecognizerJudge(Judge):
    def __init__(self, spec: RecognitionSpec, samples: QuantizationSamples, people: People | None) -> None:
        super().__init__(spec)
        self._spec, self._samples, self._people = spec, samples, people
        self._fp32 = Recognizer(OnnxNetwork(spec.path), spec)
        self._exact = _embed(self._fp32, samples.measured_crops)
        self._known = None if people is None else self._embed_people(self._fp32)

    def batches(self) -> Iterator[Float]:
        return crop_batches(self._samples.crops, self._spec)

    def measure(self, file: Path, engine: Engine, few: bool = False) -> Measured:
        recognizer = Recognizer(self.open(file, engine), self._spec)
        rows = slice(SEARCH_CROPS if few else None)
        vectors = _embed(recognizer, self._samples.measured_crops[rows])
        found: Measured = {"cosine": cosine_loss(self._exact[rows], vectors)}
        if self._known is not None and not few:
            found["galleries"] = self._galleries(self._known, self._embed_people(recognizer))
        return {**found, "accepted": self.excess(found) <= 1}

    def excess(self, measured: Measured) -> float:
        lost = (1 - measured["cosine"]["mean"]) / (1 - MIN_MEAN_COSINE)
        rates = list(measured.get("galleries", {}).values())
        return float(max([lost, *((each["fnir"] - rates[0]["fnir"]) / MAX_FNIR_LOST for each in rates)]))

    def _embed_people(self, recognizer: Recognizer) -> tuple[Float, Float, Float]:
        people = self._people
        assert people is not None  # noqa: S101 - only called with people
        return tuple(_embed(recognizer, crops) for crops in (people.gallery, people.mated, people.strangers))  # type: ignore[return-value]

    def _galleries(self, exact: tuple[Float, Float, Float], other: tuple[Float, Float, Float]) -> Measured:
        """Return error rates at thresholds of fp32, if enrolled photos and probes have these precisions."""
        people = self._people
        assert people is not None  # noqa: S101 - only called with people
        wide, narrow = (tuple(vectors.astype(np.float64) for vectors in found) for found in (exact, other))
        similarity = wide[1] @ wide[0].T
        similarity[np.arange(len(people.mates)), people.mates] = -1
        pair = float(np.quantile(np.concatenate([similarity.ravel(), (wide[2] @ wide[0].T).ravel()]), 1 - FMR))
        _, alarms = search_gallery(wide[0], wide[1], people.mates, wide[2])
        search = threshold_at_fpir(alarms, FPIR)
        return {
            name: {
                **rates_at(
                    enrolled[0],
                    probes[1],
                    people.mates,
                    probes[2],
                    pair_threshold=pair,
                    search_threshold=search,
                    fpir=FPIR,
                ),
                "fmr_asked": FMR,
            }
            for name, enrolled, probes in (
                ("fp32, probes fp32", wide, wide),
                ("fp32, probes int8", wide, narrow),
                ("int8, probes int8", narrow, narrow),
            )
        }


class DetectorJudge(Judge):
    def __init__(self, spec: DetectionSpec, detector: Detector, samples: QuantizationSamples) -> None:
        super().__init__(spec)
        self._spec, self._fp32, self._samples = spec, detector, samples
        self._exact = [detector.detect([photo])[0] for photo in samples.measured_photos]

    def batches(self) -> Iterator[Float]:
        return photo_batches(self._samples.photos, self._fp32)

    def measure(self, file: Path, engine: Engine, few: bool = False) -> Measured:
        detector = Detector(self.open(file, engine), self._spec)
        rows = slice(SEARCH_PHOTOS if few else None)
        faces = [detector.detect([photo])[0] for photo in self._samples.measured_photos[rows]]
        found = {"landmark_shift": detection_shift(self._exact[rows], faces)}
        return {**found, "accepted": self.excess(found) <= 1}

    def excess(self, measured: Measured) -> float:
        shift = measured["landmark_shift"]
        if not shift["faces"] or "eye_distances" not in shift:
            return np.inf
        lost = shift["lost"] / shift["faces"]
        return float(max(shift["eye_distances"]["p95"] / MAX_LANDMARK_SHIFT, lost / MAX_FACES_LOST))


def _embed(recognizer: Recognizer, crops: Crops) -> Float:
    return np.concatenate([recognizer.embed(crops[i : i + EMBED_ROWS]) for i in range(0, len(crops), EMBED_ROWS)])

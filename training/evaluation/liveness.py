"""Liveness network of a pack on photos of live faces and of attacks, as served."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from models.errors import PackError
from models.pack.manifest import ModelPack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector
from models.vision.liveness import LivenessClassifier
from models.vision.specs import LivenessSpec
from training.evaluation.metrics import Floats
from training.evaluation.presentation_attacks import measure_presentations, presentation_rows
from training.liveness.data import Presentations, load_presentations

SCORED_BATCH_SIZE: Final = 128


def score_presentations(spec: LivenessSpec, photos: Presentations) -> Floats:
    """Return the (n,) scores of a network in [0, 1]."""
    classifier, crops = LivenessClassifier(OnnxNetwork(spec.path), spec), photos.crops_NHWC
    parts = [classifier.scores(crops[i : i + SCORED_BATCH_SIZE]) for i in range(0, len(crops), SCORED_BATCH_SIZE)]
    return np.concatenate(parts).astype(np.float64)


def evaluate_liveness(pack: ModelPack, live: Path, attack: Path) -> list[tuple[str, str]]:
    """Return the error rates of a pack's liveness network at the pack's threshold, as rows of a table.

    ``live`` and ``attack`` are folders as of `load_presentations`.

    Raises:
        PackError: the pack has no liveness network.
        ConfigError: the photos cannot be used.
    """
    if pack.liveness is None:
        raise PackError("tasks.liveness", f"is missing in {pack.directory}: name one in its manifest")
    spec, detector = pack.liveness, Detector(OnnxNetwork(pack.detection.path), pack.detection)
    photos = load_presentations(live, attack, detector, spec.crop, spec.max_outside)
    figures = measure_presentations(
        score_presentations(spec, photos), photos.instruments, photos.people, spec.threshold
    )
    return presentation_rows(figures, photos.not_judged)

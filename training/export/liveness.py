"""Export of a liveness network into a pack."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Final

from torch import nn

from models.checksums import sha256_of
from models.errors import PackError
from models.pack.manifest import MANIFEST_FILE, ModelPack
from models.pack.writing import update_liveness
from models.vision.specs import LivenessSpec, Normalization
from training.config import ConfigError
from training.data.subsampling import evenly_spaced_rows
from training.evaluation.liveness import score_presentations
from training.evaluation.presentation_attacks import measure_presentations, threshold_at_apcer
from training.export.onnx_export import export_liveness
from training.liveness.data import Presentations
from training.liveness.fit import TRAINED_ALIGNMENT
from training.optimization.loop import to_tensor
from training.optimization.run_folder import CONFIG, read_json

LIVENESS_FILE: Final = "liveness.onnx"
MAX_OUTSIDE: Final = 0.3
"""Largest share of a crop outside the photo, in [0, 1]: InsightFace's limit."""
PARITY_CROPS: Final = 32


def check_writable(pack: ModelPack) -> None:
    """Raise PackError if the pack has no manifest or is read-only."""
    if not (pack.directory / MANIFEST_FILE).is_file():
        raise PackError(MANIFEST_FILE, f"does not exist in {pack.directory}: only packs with a manifest can be updated")
    if not os.access(pack.directory, os.W_OK):
        raise PackError("liveness", f"{pack.directory} is read-only: copy the pack and add the network to the copy")


def add_liveness(
    pack: ModelPack, network: nn.Module, development: Presentations, apcer: float, run: Path
) -> dict[str, Any]:
    """Export a network, choose its threshold on ``development``, and add both to a pack.

    Args:
        network: as of `training.liveness.fit.build_network`.
        development: presentations of people that the network was not trained on.
        apcer: limit in [0, 1) for the APCER of every instrument on ``development``.
        run: folder of the run, for the ONNX file and the provenance.

    Returns:
        The figures of `measure_presentations` on ``development``.

    Raises:
        ParityError: onnxruntime disagrees with torch; the pack is unchanged.
        ConfigError: attacks get the highest score; the pack is unchanged.
    """
    path, normalization = run / LIVENESS_FILE, Normalization(127.5, 127.5)
    crops = development.crops_NHWC[evenly_spaced_rows(len(development), PARITY_CROPS)]
    export_liveness(network, to_tensor(crops), path)
    spec = LivenessSpec(path, None, normalization, TRAINED_ALIGNMENT, None, 0.0, MAX_OUTSIDE)
    scores = score_presentations(spec, development)
    threshold = threshold_at_apcer(scores, development.instruments, apcer)
    if threshold > 1:
        raise ConfigError("attacks get the highest score. Train for more steps, with more photos")
    figures = measure_presentations(scores, development.instruments, development.people, threshold)
    shutil.copyfile(path, pack.directory / LIVENESS_FILE)
    task = {
        "file": LIVENESS_FILE,
        "sha256": sha256_of(path),
        "preprocessing": {"mean": normalization.mean, "std": normalization.std},
        "input_size": [TRAINED_ALIGNMENT.size_px] * 2,
        "alignment": {"template": TRAINED_ALIGNMENT.template},
        "threshold": threshold,
        "max_outside": MAX_OUTSIDE,
    }
    update_liveness(pack.directory, task, {"run": read_json(run / CONFIG), "development": figures})
    return figures

"""Comparison of the papers' losses on the same people and budget, in one table."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.config import ConfigError, RunConfig
from training.data.identities import IdentitySet, load_identities
from training.evaluation.embedding import Embed, embed_crops
from training.evaluation.lfw import LfwCrops, evaluate_lfw
from training.evaluation.metrics import AngleStatistics, angle_statistics
from training.optimization.run_folder import CONFIG, read_json, read_run_config

COLUMNS = (
    "loss",
    "View 1 %",
    "View 2 %",
    "TAR@FAR 1e-2 %",
    "TAR@FAR 1e-3 %",
    "W-EC",
    "W-Inter",
    "Intra train",
    "Inter train",
    "Intra LFW",
    "Inter LFW",
)
ROW = "row.json"
MAX_ANGLE_CROPS = 4096
"""Maximum number of training crops, from the first people, for angle statistics."""

Cells = tuple[str, ...]


def comparison_row(config: RunConfig, embed: Embed, weights_CD: Tensor | None, crops: LfwCrops) -> Cells:
    """Evaluate a finished run on LFW's two views and its training crops. Return a row; angles in degrees."""
    data = load_identities(config.data, config.output.parent / "cache")
    own = training_angles(embed, data, weights_CD)
    judgment = evaluate_lfw(embed, crops, parts=("view1", "view2"))
    view1, view2, lfw = judgment.view1, judgment.view2, judgment.angles
    if view1 is None or view2 is None:
        raise ValueError("the comparison needs crops of View 1 and View 2")
    return (
        config.name,
        f"{view1.accuracy * 100:.2f}",
        f"{view2.accuracy.mean * 100:.2f} ± {view2.accuracy.std * 100:.2f}",
        f"{view2.tar_at_far_1e2 * 100:.1f}",
        f"{view2.tar_at_far_1e3 * 100:.1f}",
        *("-" if v is None else f"{v:.1f}" for v in (own.w_ec, own.w_inter)),
        *(f"{v:.1f}" for v in (own.intra, own.inter, lfw.intra, lfw.inter)),
    )


def load_row(config: RunConfig, detector: str) -> Cells | None:
    """Return the saved row of a run, or None if it used another detector (by the hash of its file). Raises ConfigError
    if the folder holds a run with other settings."""
    if (config.output / CONFIG).is_file() and read_run_config(config.output) != config:
        raise ConfigError(f"{config.output} holds a run with other settings. Choose another --output")
    path = config.output / ROW
    document = read_json(path) if path.is_file() else {}
    return tuple(document["cells"]) if document.get("detector") == detector else None


def save_row(config: RunConfig, detector: str, cells: Cells) -> None:
    (config.output / ROW).write_text(json.dumps({"detector": detector, "cells": cells}), encoding="utf-8")


def training_angles(embed: Embed, data: IdentitySet, weights_CD: Tensor | None) -> AngleStatistics:
    """Return the angle statistics of a head on the first people of its training set."""
    rows = np.flatnonzero(data.labels < _people_within(data.labels, MAX_ANGLE_CROPS))
    weights = None if weights_CD is None else weights_CD.detach().cpu().numpy()
    return angle_statistics(embed_crops(embed, data.crops_NHWC[rows]), data.labels[rows], weights)


def training_angle_rows(own: AngleStatistics) -> list[tuple[str, str]]:
    """Return names and values for a report."""
    named = {"W-EC": own.w_ec, "W-Inter": own.w_inter, "Intra, training": own.intra, "Inter, training": own.inter}
    return [(name, f"{value:.1f} degrees") for name, value in named.items() if value is not None]


def _people_within(labels: NDArray[np.int64], images: int) -> int:
    """Return how many of the first classes have at most ``images`` images together, at least two."""
    return max(2, int((np.cumsum(np.bincount(labels)) <= images).sum()))


def markdown(rows: Iterable[Cells]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def write_table(rows: Sequence[Cells], folder: Path) -> None:
    """Write comparison.csv and comparison.md."""
    with (folder / "comparison.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([COLUMNS, *rows])
    (folder / "comparison.md").write_text(markdown(rows), encoding="utf-8")

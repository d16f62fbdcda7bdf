"""Comparison of the papers' losses on the same people and budget, in one table."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from models.checksums import sha256_of
from models.vision.specs import DetectionSpec
from training.config import ConfigError, RunConfig
from training.data.identities import IdentitySet, load_identities
from training.evaluation.embedding import Embed, embed_crops, torch_embedder
from training.evaluation.lfw import LfwCrops, evaluate_lfw, load_lfw_crops
from training.evaluation.metrics import AngleStatistics, angle_statistics
from training.optimization.run_folder import CONFIG, read_json, read_run_config
from training.recipes import compared
from training.run.train import train_recognizer

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
"""Maximum number of training crops, from the first people (at least two), for angle statistics."""


def compare(losses: Sequence[str], data: Path, output: Path, detection: DetectionSpec, epochs: int, people: int) -> str:
    """Train the given losses one after the other, evaluate each on LFW, and return a Markdown table.

    LFW is aligned by this detector. Losses with saved results are skipped. The table in ``output``, comparison.csv and
    comparison.md, grows run by run. Raises ConfigError if a folder holds a run with other settings.
    """
    crops = load_lfw_crops(data / "lfw", detection, output / "cache", ("view1", "view2"))
    detector = sha256_of(detection.path)
    rows, table = [COLUMNS], ""
    for loss in losses:
        config = compared(loss, data / "celeba", output / loss, epochs, people)
        if (config.output / CONFIG).is_file() and read_run_config(config.output) != config:
            raise ConfigError(f"{config.output} holds a run with other settings. Choose another --output")
        path = config.output / ROW
        saved = read_json(path) if path.is_file() else {}
        if saved.get("detector") != detector:  # by the hash of its file
            finished = train_recognizer(config)
            row = _row(config, torch_embedder(finished.backbone), finished.head.class_weights(), crops)
            saved = {"detector": detector, "cells": row}
            path.write_text(json.dumps(saved), encoding="utf-8")
        rows.append(tuple(saved["cells"]))
        with (output / "comparison.csv").open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(rows)
        lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows[1:]]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
        (output / "comparison.md").write_text(table, encoding="utf-8")
    return table


def _row(config: RunConfig, embed: Embed, weights_CD: Tensor | None, crops: LfwCrops) -> tuple[str, ...]:
    """Evaluate a finished run on LFW's two views and its training crops; angles in degrees."""
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


def training_angles(embed: Embed, data: IdentitySet, weights_CD: Tensor | None) -> AngleStatistics:
    """Return the angle statistics of a head on the first people of its training set."""
    people = max(2, int((np.cumsum(np.bincount(data.labels)) <= MAX_ANGLE_CROPS).sum()))
    rows = np.flatnonzero(data.labels < people)
    weights = None if weights_CD is None else weights_CD.detach().cpu().numpy()
    return angle_statistics(embed_crops(embed, data.crops_NHWC[rows]), data.labels[rows], weights)


def training_angle_rows(own: AngleStatistics) -> list[tuple[str, str]]:
    """Return names and values for a report."""
    named = {"W-EC": own.w_ec, "W-Inter": own.w_inter, "Intra, training": own.intra, "Inter, training": own.inter}
    return [(name, f"{value:.1f} degrees") for name, value in named.items() if value is not None]

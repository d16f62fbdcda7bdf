"""The papers' losses side by side: the same people, the same budget, one table."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.benchmarks import Embed, LfwCrops, embed_crops, judge
from training.config import ConfigError, RunConfig
from training.data.identities import IdentitySet, load_identities
from training.metrics import AngleStatistics, angle_statistics
from training.run_folder import CONFIG, read_json, read_run

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
MOST_TRAINING_CROPS = 4096
"""Of the first people, of which a run's own angles are taken."""


Cells = tuple[str, ...]


def judged(config: RunConfig, embed: Embed, weights_CD: Tensor | None, crops: LfwCrops) -> Cells:
    """A finished run on LFW's two views and on its own training crops, as a row; angles in degrees."""
    data = load_identities(config.data, config.output.parent / "cache")
    own = own_angles(embed, data, weights_CD)
    judgement = judge(embed, crops, parts=("view1", "view2"))
    view1, view2, lfw = judgement.view1, judgement.view2, judgement.angles
    if view1 is None or view2 is None:
        raise ValueError("a comparison needs the crops of View 1 and View 2")
    return (
        config.name,
        f"{view1.accuracy * 100:.2f}",
        f"{view2.accuracy.mean * 100:.2f} ± {view2.accuracy.std * 100:.2f}",
        f"{view2.tar_at_far_1e2 * 100:.1f}",
        f"{view2.tar_at_far_1e3 * 100:.1f}",
        *("-" if v is None else f"{v:.1f}" for v in (own.w_ec, own.w_inter)),
        *(f"{v:.1f}" for v in (own.intra, own.inter, lfw.intra, lfw.inter)),
    )


def remembered(config: RunConfig, detector: str) -> Cells | None:
    """The row of a run that was judged before on crops of this detector (its file's hash).

    Raises:
        ConfigError: the folder holds a run with other settings, such as another budget.
    """
    if (config.output / CONFIG).is_file() and read_run(config.output) != config:
        raise ConfigError(f"{config.output} holds a run with other settings; choose another --output")
    path = config.output / ROW
    document = read_json(path) if path.is_file() else {}
    return tuple(document["cells"]) if document.get("detector") == detector else None


def remember(config: RunConfig, detector: str, cells: Cells) -> None:
    (config.output / ROW).write_text(json.dumps({"detector": detector, "cells": cells}), encoding="utf-8")


def own_angles(embed: Embed, data: IdentitySet, weights_CD: Tensor | None) -> AngleStatistics:
    """A head's angle statistics on (the first people of) its training set."""
    rows = np.flatnonzero(data.labels < _people_within(data.labels, MOST_TRAINING_CROPS))
    weights = None if weights_CD is None else weights_CD.detach().cpu().numpy()
    return angle_statistics(embed_crops(embed, data.crops_NHWC[rows]), data.labels[rows], weights)


def own_angle_rows(own: AngleStatistics) -> list[tuple[str, str]]:
    """For a report."""
    named = {"W-EC": own.w_ec, "W-Inter": own.w_inter, "Intra, training": own.intra, "Inter, training": own.inter}
    return [(name, f"{value:.1f} degrees") for name, value in named.items() if value is not None]


def _people_within(labels: NDArray[np.int64], images: int) -> int:
    """How many of the first classes have at most so many images together; two at least."""
    return max(2, int((np.cumsum(np.bincount(labels)) <= images).sum()))


def markdown(rows: Iterable[Cells]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def write_table(rows: Sequence[Cells], folder: Path) -> None:
    """comparison.csv and comparison.md."""
    with (folder / "comparison.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([COLUMNS, *rows])
    (folder / "comparison.md").write_text(markdown(rows), encoding="utf-8")

"""The seed notes' losses side by side: the same people, the same budget, one table."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.benchmarks import Embed, Judgement, LfwCrops, embed_crops, judge
from training.config import RunConfig
from training.data.identities import IdentitySet, load_identities
from training.loop import Checkpoint
from training.metrics import AngleStatistics, angle_statistics

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
MOST_TRAINING_CROPS = 4096
"""Of which a run's own angles are taken: a spread over the whole set."""


@dataclass(frozen=True)
class Row:
    """One run, judged. Angles in degrees."""

    loss: str
    judgement: Judgement
    own: AngleStatistics

    def cells(self) -> tuple[str, ...]:
        view1, view2, lfw = self.judgement.view1, self.judgement.view2, self.judgement.angles
        if view1 is None or view2 is None:
            raise ValueError("a comparison needs View 1 and View 2")
        return (
            self.loss,
            f"{view1.accuracy * 100:.2f}",
            f"{view2.accuracy.mean * 100:.2f} ± {view2.accuracy.std * 100:.2f}",
            f"{view2.tar_at_far_1e2 * 100:.1f}",
            f"{view2.tar_at_far_1e3 * 100:.1f}",
            *("-" if v is None else f"{v:.1f}" for v in (self.own.w_ec, self.own.w_inter)),
            *(f"{v:.1f}" for v in (self.own.intra, self.own.inter, lfw.intra, lfw.inter)),
        )


def judge_run(config: RunConfig, finished: Checkpoint, embed: Embed, crops: LfwCrops) -> Row:
    """A finished run on LFW's two views and on its own training crops."""
    data = load_identities(config.data, config.output.parent / "cache")
    own = own_angles(embed, data, finished.head.class_weights())
    return Row(config.name, judge(embed, crops, parts=("view1", "view2")), own)


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


def markdown(rows: Iterable[Row]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def write_table(rows: Iterable[Row], path: Path) -> None:
    """comparison.csv and comparison.md in ``path``."""
    rows = list(rows)
    with (path / "comparison.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([COLUMNS, *(row.cells() for row in rows)])
    (path / "comparison.md").write_text(markdown(rows), encoding="utf-8")

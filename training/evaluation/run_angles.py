"""Angles of a run or pack: to class weights during training, and between the photos of verification pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float
from models.vision.alignment import realign_crops
from models.vision.specs import DetectionSpec
from training.config import ConfigError
from training.evaluation.cfp import embed_cfp, load_cfp_crops
from training.evaluation.embedding import load_embedder
from training.evaluation.lfw import Part, embed_lfw, load_lfw_crops, read_pairs
from training.evaluation.metrics import Bools, Floats
from training.evaluation.plots import read_columns
from training.optimization.logs import ANGLE_BINS
from training.optimization.monitor import AngleWindow, angle_window
from training.optimization.run_folder import ANGLES, LOSSES, read_run_config

BIN_DEG: Final = 180 / ANGLE_BINS
VIEW2: Final[tuple[Part, ...]] = ("view2",)
WINDOWS: Final[tuple[AngleWindow, ...]] = ("start", "middle", "end")


@dataclass(frozen=True, eq=False)
class RunAngles:
    """Angles of a run in degrees.

    Attributes:
        name: name of the run, and its head if that differs.
        steps: (T,) logged steps.
        target, other: (T,) mean angle to the weight of the own class, and to those of others.
        scale: (T,) s, or None for a head without a scale.
        densities: (2, ANGLE_BINS) densities per degree of target and other angles, by window.
    """

    name: str
    steps: Floats
    target: Floats
    other: Floats
    scale: Floats | None
    densities: Mapping[AngleWindow, Floats]


def read_run_angles(run: Path) -> RunAngles:
    """Read the angles that a run logged. Raises ConfigError if its head has no class weights, or it is no run."""
    head = read_run_config(run).head.name
    columns = read_columns(run / LOSSES)
    if "other_angle_deg" not in columns:
        raise ConfigError(f"{run} logged no angles: its head {head} holds no class weights, or a sample of them")
    counted = read_columns(run / ANGLES)
    steps = counted.pop("step")
    counts = np.stack(list(counted.values()), 1).reshape(len(steps), 2, ANGLE_BINS)
    windows = np.array([angle_window(int(step), int(columns["step"][-1])) for step in steps])
    densities = {}
    for window in WINDOWS:
        if (windows == window).any():
            total = counts[windows == window].sum(0)
            densities[window] = total / (total.sum(1, keepdims=True) * BIN_DEG)
    return RunAngles(
        run.name if run.name == head else f"{run.name} ({head})",
        columns["step"],
        columns["target_angle_deg"],
        columns["other_angle_deg"],
        columns.get("scale"),
        densities,
    )


@dataclass(frozen=True, eq=False)
class PairAngles:
    """Angles in degrees, (P,), between the embeddings of the pairs of a list; ``same``: pairs of one person."""

    angles: Floats
    same: Bools

    def overlap(self) -> float:
        """Return the smallest share of wrong pairs at any angle, as the mean over both kinds of pairs."""
        order = np.argsort(self.angles, kind="stable")
        same = self.same[order]
        missed = 1 - np.cumsum(same) / same.sum()
        accepted = np.cumsum(~same) / (~same).sum()
        return float(min(0.5, ((missed + accepted) / 2).min()))


def measure_pair_angles(model: Path, data: Path, detection: DetectionSpec, cache: Path) -> dict[str, PairAngles]:
    """Embed LFW's View 2, aligned by this detector, and CFP if ``data`` has it, with a run or pack. Pairs with a photo
    without a face are left out. Raises ConfigError as the readers of these sets do."""
    embed, alignment = load_embedder(model)

    def embed_standard(crops: NDArray[np.uint8]) -> Float:
        return embed(realign_crops(crops, alignment))

    lfw = load_lfw_crops(data / "lfw", detection, cache, ("view1", "view2"))  # the crops of `kith-train compare`
    view2 = embed_lfw(embed_standard, lfw, parts=VIEW2)
    judged = {"LFW": (read_pairs(data / "lfw" / "pairs.txt"), view2)}
    if (data / "cfp").is_dir():
        cfp = load_cfp_crops(data / "cfp", cache)
        embedded = embed_cfp(embed_standard, cfp)
        judged |= {name: (pairs, embedded) for name, pairs in cfp.pairs.items()}
    found = {}
    for name, (pairs, embeddings) in judged.items():
        seen = embeddings.found[embeddings.rows(pairs.first)] & embeddings.found[embeddings.rows(pairs.second)]
        similarities = np.clip(embeddings.similarities(pairs)[seen], -1, 1)
        found[name] = PairAngles(np.degrees(np.arccos(similarities)), pairs.same[seen])
    return found

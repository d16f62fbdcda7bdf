"""Comparison of the papers' losses on the same people and budget, in one table."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from types import MappingProxyType

import numpy as np
from torch import Tensor

from models.checksums import sha256_of
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import realign_crops, standard_alignment
from models.vision.detection import Detector
from models.vision.specs import DetectionSpec
from training.config import ConfigError, RunConfig
from training.data.identities import IdentitySet, load_identities
from training.evaluation.cfp import CfpCrops, embed_cfp, load_cfp_crops
from training.evaluation.embedding import Embed, embed_crops, torch_embedder
from training.evaluation.lfw import LfwCrops, Part, evaluate_lfw, load_lfw_crops, verify
from training.evaluation.metrics import AngleStatistics, angle_statistics
from training.optimization.objective import build_losses
from training.optimization.run_folder import CONFIG, LOSSES, read_json, read_run_config
from training.recipes import FIRST_SEED, compared
from training.run.train import train_recognizer

COLUMNS: Mapping[str, int] = MappingProxyType(
    {
        "Training loss": 2,
        "Training accuracy %": 1,
        "View 1 %": 2,
        "View 2 %": 2,
        "TAR@FAR 1e-2 %": 1,
        "TAR@FAR 1e-3 %": 1,
        "CFP-FF %": 2,
        "CFP-FP %": 2,
        "W-EC": 1,
        "W-Inter": 1,
        "W-Intra": 1,
        "Intra train": 1,
        "Inter train": 1,
        "Intra LFW": 1,
        "Inter LFW": 1,
    }
)
"""Decimals of each column: mean loss and accuracy of the last epoch's batches, accuracies, rates, and angles in degrees
as `AngleStatistics` has them."""
ROW = "row.json"
MAX_ANGLE_CROPS = 4096
"""Maximum number of training crops, from the first people (at least two), for angle statistics."""
Row = Mapping[str, float]
"""Values by column; a missing column does not apply."""


def compare(
    losses: Sequence[str],
    data: Path,
    output: Path,
    detection: DetectionSpec,
    epochs: int,
    people: int,
    seeds: int = 1,
    settings: Mapping[str, str] | None = None,
    grid: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Train the given losses one after the other, evaluate each on LFW and CFP, and return a Markdown table.

    LFW, and training photos with ``data.aligned=false``, are aligned by this detector, to crops of ``data.crop_px``;
    CFP's crops are scaled. CFP is left out if ``data`` has none. All runs share the ``settings``, as
    `RunConfig.overridden` takes them. With a ``grid`` of values by setting, each loss is trained with every
    combination, which is part of its name. With several ``seeds``, a cell is the mean and standard deviation over runs
    that differ in the seed alone. Runs with saved results are skipped. The table in ``output``, comparison.csv and
    comparison.md, grows loss by loss. Raises ConfigError if a setting does not suit a loss, before any training; if a
    folder holds a run with other settings; or if an aligned crop has another size.
    """
    runs: dict[str, list[RunConfig]] = {}
    points = [dict(zip(grid or (), values, strict=True)) for values in product(*(grid or {}).values())]
    for loss, point in product(losses, points):
        name = "-".join([loss, *(f"{k}={v}" for k, v in point.items())]).replace("/", "_")
        folders = {
            s: output / (name if s == FIRST_SEED else f"{name}-seed-{s}") for s in range(FIRST_SEED, FIRST_SEED + seeds)
        }
        runs[name] = [
            compared(loss, data / "celeba", folder, epochs, people, seed).overridden({**(settings or {}), **point})
            for seed, folder in folders.items()
        ]
    for config in chain.from_iterable(runs.values()):
        build_losses(config, num_classes=64)
    cfp = load_cfp_crops(data / "cfp", output / "cache") if (data / "cfp").is_dir() else None
    evidence = {"detector": sha256_of(detection.path), "cfp": cfp is not None}
    detector = Detector(OnnxNetwork(detection.path), detection)
    views: tuple[Part, ...] = ("view1", "view2")
    lfw = {
        size: load_lfw_crops(data / "lfw", detection, output / "cache", views, alignment=standard_alignment(size))
        for size in {config.data.crop_px for configs in runs.values() for config in configs}
    }
    found: dict[str, list[Row]] = {}
    table = ""
    for name, configs in runs.items():
        found[name] = [_measured(config, lfw[config.data.crop_px], cfp, evidence, detector) for config in configs]
        lines = [("loss", *COLUMNS), *((name, *summarize(rows)) for name, rows in found.items())]
        with (output / "comparison.csv").open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(lines)
        lines.insert(1, tuple("---" for _ in lines[0]))
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
        (output / "comparison.md").write_text(table, encoding="utf-8")
    return table


def summarize(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the cells of the runs of one loss: a value, or mean ± standard deviation (ddof 1) over runs."""
    cells = []
    for column, decimals in COLUMNS.items():
        values = [row[column] for row in rows if column in row]
        spread = f" ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else ""
        cells.append(f"{statistics.fmean(values):.{decimals}f}{spread}" if values else "-")
    return tuple(cells)


def _measured(
    config: RunConfig, crops: LfwCrops, cfp: CfpCrops | None, evidence: Mapping[str, object], detector: Detector
) -> Row:
    """Return the saved results of a run if they come from the same ``evidence``; else train and evaluate it."""
    if (config.output / CONFIG).is_file() and read_run_config(config.output) != config:
        raise ConfigError(f"{config.output} holds a run with other settings. Choose another --output")
    path = config.output / ROW
    saved = read_json(path) if path.is_file() else {}
    if saved.get("evidence") != evidence:
        finished = train_recognizer(config, detector)
        row = _row(config, torch_embedder(finished.backbone), finished.head.class_weights(), crops, cfp)
        saved = {"evidence": dict(evidence), "values": row}
        path.write_text(json.dumps(saved), encoding="utf-8")
    values: Row = saved["values"]
    return values


def _row(
    config: RunConfig, embed: Embed, weights_CD: Tensor | None, crops: LfwCrops, cfp: CfpCrops | None
) -> dict[str, float]:
    """Evaluate a finished run on LFW's two views, CFP's two lists and its training crops."""
    data = load_identities(config.data, config.output.parent / "cache")
    own = training_angles(embed, data, weights_CD)
    judgment = evaluate_lfw(embed, crops, intervals=False)
    view1, view2, lfw = judgment.view1, judgment.view2, judgment.angles
    if view1 is None or view2 is None:
        raise ValueError("the comparison needs crops of View 1 and View 2")
    values = {
        **_last_epoch(config),
        "View 1 %": view1.accuracy * 100,
        "View 2 %": view2.accuracy.mean * 100,
        "TAR@FAR 1e-2 %": view2.tar_at_far_1e2 * 100,
        "TAR@FAR 1e-3 %": view2.tar_at_far_1e3 * 100,
        "W-EC": own.w_ec,
        "W-Inter": own.w_inter,
        "W-Intra": own.w_intra,
        "Intra train": own.intra,
        "Inter train": own.inter,
        "Intra LFW": lfw.intra,
        "Inter LFW": lfw.inter,
    }
    if cfp is not None:
        alignment = standard_alignment(config.data.crop_px)
        embedded = embed_cfp(lambda crops: embed(realign_crops(crops, alignment)), cfp)
        for name, pairs in cfp.pairs.items():
            values[f"{name} %"] = verify(embedded, pairs, intervals=False).accuracy.mean * 100
    return {column: value for column, value in values.items() if value is not None}


def _last_epoch(config: RunConfig) -> dict[str, float | None]:
    """Return the mean loss and accuracy of the batches of a finished run's last epoch."""
    with (config.output / LOSSES).open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    last = rows[-(len(rows) // config.loop.epochs) :]
    accuracies = [float(row["accuracy"]) for row in last if row.get("accuracy")]
    return {
        "Training loss": statistics.fmean(float(row["loss"]) for row in last),
        "Training accuracy %": statistics.fmean(accuracies) * 100 if accuracies else None,
    }


def training_angles(embed: Embed, data: IdentitySet, weights_CD: Tensor | None) -> AngleStatistics:
    """Return the angle statistics of a head on the first people of its training set."""
    people = max(2, int((np.cumsum(np.bincount(data.labels)) <= MAX_ANGLE_CROPS).sum()))
    rows = np.flatnonzero(data.labels < people)
    weights = None if weights_CD is None else weights_CD.detach().cpu().numpy()
    return angle_statistics(embed_crops(embed, data.crops_NHWC[rows]), data.labels[rows], weights)


def training_angle_rows(own: AngleStatistics) -> list[tuple[str, str]]:
    """Return names and values for a report."""
    named = {
        "W-EC": own.w_ec,
        "W-Inter": own.w_inter,
        "W-Intra": own.w_intra,
        "Intra, training": own.intra,
        "Inter, training": own.inter,
    }
    return [(name, f"{value:.1f} degrees") for name, value in named.items() if value is not None]

"""Training and evaluation runs from top to bottom: recognizer, loss comparison, detector, liveness, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.checksums import sha256_of
from models.pack.manifest import ModelPack
from models.vision.detection import Detector
from models.vision.specs import DetectionSpec
from training import distributed
from training.backbones import build_backbone
from training.config import RunConfig
from training.data.identities import hold_out, load_identities
from training.data.verification import read_bin
from training.detection.crops import Photos
from training.detection.fit import BLOCKS, SCALE_CROPS, DetectorFit, draw_crops, fit_detector
from training.detection.network import FaceDetector
from training.detection.teacher import DetectorTeacher
from training.evaluation import plots
from training.evaluation.benchmarks import evaluate_bin
from training.evaluation.embedding import cached_embedder, load_run, torch_embedder
from training.evaluation.lfw import PARTS, VIEW1, load_lfw_crops
from training.liveness.data import Presentations
from training.liveness.fit import LivenessLoopConfig, fit_liveness
from training.losses import build_head
from training.optimization.loop import Checkpoint, Validator, fit, to_tensor
from training.optimization.objective import Objective, build_losses, build_objective
from training.optimization.run_folder import (
    CHECKPOINT,
    LOSSES,
    check_classes,
    load_checkpoint,
    write_run_config,
)
from training.optimization.sharded import read_class_weights
from training.recipes import compared
from training.run.compare import (
    Cells,
    comparison_row,
    load_row,
    markdown,
    save_row,
    training_angle_rows,
    training_angles,
    write_table,
)
from training.run.html_report import collect_lfw_results, headline_rows, write_report

MUTABLE_SETTINGS = ("epochs", "root", "output", "workers", "sharded_checkpoint")
"""Settings that may change between stop and resumption."""


def train_recognizer(config: RunConfig, detector: Detector | None = None) -> Checkpoint:
    """Train or resume a recognizer. ``detector`` is needed for unaligned photos only."""
    build_losses(config, num_classes=64)  # reports wrong settings before the photos are read
    torch.manual_seed(config.loop.seed)
    if distributed.rank() == 0:
        write_run_config(
            config.output,
            config.as_dict(),
            config.output / CHECKPOINT,
            mutable=MUTABLE_SETTINGS,
        )
        # Fill the cache before the other ranks read it.
        load_identities(config.data, config.output.parent / "cache", detector)
    distributed.barrier()
    data, held_out = hold_out(
        load_identities(config.data, config.output.parent / "cache", detector),
        config.distill.held_out,
        config.loop.seed,
    )
    backbone = build_backbone(config.backbone)
    objective = build_objective(config, data.num_classes)
    validate = build_validator(config.validation, objective, held_out) if distributed.rank() == 0 else None
    checkpoint = fit(backbone, objective, data, config, validate)
    if distributed.rank() == 0:
        (config.output / "losses.png").write_bytes(plots.png(plots.loss_curves(config.output / LOSSES)))
    return checkpoint


def build_validator(
    validation: Sequence[Path], objective: Objective | None = None, held_out: NDArray[np.uint8] | None = None
) -> Validator | None:
    """Return a function that computes the ten-fold accuracy on each .bin set, by name, and the distillation loss of the
    held-out crops."""
    distillation = None if objective is None or held_out is None or not len(held_out) else objective.distillation
    if not validation and distillation is None:
        return None
    sets = {path.stem: read_bin(path) for path in validation}

    def validate(network: nn.Module) -> dict[str, float]:
        figures = {
            f"{name} accuracy": evaluate_bin(torch_embedder(network), pairs).accuracy.mean
            for name, pairs in sets.items()
        }
        if distillation is not None and held_out is not None:
            images = to_tensor(held_out, next(network.parameters()).device)
            figures["held-out distillation loss"] = distillation.measure(network, images)
        return figures

    return validate


def compare(losses: Sequence[str], data: Path, output: Path, detection: DetectionSpec, epochs: int, people: int) -> str:
    """Train the given losses one after the other, evaluate each on LFW, and return a Markdown table.

    LFW is aligned by this detector. Losses with saved results are skipped. The table in ``output`` grows run by run.
    """
    crops = load_lfw_crops(data / "lfw", detection, output / "cache", ("view1", "view2"))
    detector = sha256_of(detection.path)
    rows: list[Cells] = []
    for loss in losses:
        config = compared(loss, data / "celeba", output / loss, epochs, people)
        row = load_row(config, detector)
        if row is None:
            finished = train_recognizer(config)
            row = comparison_row(config, torch_embedder(finished.backbone), finished.head.class_weights(), crops)
            save_row(config, detector, row)
        rows.append(row)
        write_table(rows, output)
    return markdown(rows)


def train_detector(photos: Photos, teacher: ModelPack, output: Path, fit: DetectorFit) -> FaceDetector:
    """Train or resume a detector that computes what the YuNet of a pack does.

    Raises:
        ConfigError: the run was started with other photos or settings.
        ModelError: the pack's detector is not a YuNet.
    """
    settings = {**asdict(fit), "photos": photos.counts(), "teacher": teacher.model_id}
    write_run_config(output, settings, output / BLOCKS, mutable=())
    crops = draw_crops(photos, SCALE_CROPS, fit.seed, 2)
    return fit_detector(photos, DetectorTeacher(teacher.detection, crops), fit, output)


def train_liveness(photos: Presentations, output: Path, loop: LivenessLoopConfig) -> nn.Module:
    """Train or resume a liveness network. Raises ConfigError if the run was started with other photos or settings."""
    settings = {**asdict(loop), "photos": photos.counts()}
    write_run_config(output, settings, output / CHECKPOINT, mutable=("steps",))
    return fit_liveness(photos, loop, output)


def report_run(
    run: Path, data: Path, detection: DetectionSpec, report: Path | None, flip: bool = False, view1: bool = False
) -> list[tuple[str, str]]:
    """Evaluate a run on LFW (``data``/lfw, aligned by this detector) and return the figures.

    With ``report``, also write them as HTML, with curves, worst pairs and sample crops.
    """
    config, backbone = load_run(run)
    parts = VIEW1 if view1 else PARTS
    crops = load_lfw_crops(data / "lfw", detection, run.parent / "cache", parts)
    embed, vectors = cached_embedder(torch_embedder(backbone), run / CHECKPOINT, run.parent / "cache")
    evidence = collect_lfw_results(embed, crops, flip)
    trained_on = load_identities(config.data, config.output.parent / "cache")
    head = build_head(config.head, config.backbone.embedding_dim, trained_on.num_classes)
    state = load_checkpoint(run / CHECKPOINT)
    check_classes(state, trained_on, run / CHECKPOINT)
    shards = state.get("shards")
    head.load_full_state({**state["head"], **({"weight": read_class_weights(run, shards)} if shards else {})})
    own = training_angles(embed, trained_on, head.class_weights())
    vectors.save()
    about = [("Head", _describe_head(config)), *training_angle_rows(own)]
    if report is not None:
        write_report(report, f"Run {config.name}", about, run / LOSSES, evidence, trained_on.crops_NHWC)
    return [*about, *((name, value) for name, value, _ in headline_rows(evidence.judgment))]


def _describe_head(config: RunConfig) -> str:
    options = ", ".join(f"{k}={v}" for k, v in config.head.options.items())
    terms = "".join(f" + {t.weight:g} {t.name}" for t in config.terms)
    return f"{config.head.name}{f' ({options})' if options else ''}{terms}"

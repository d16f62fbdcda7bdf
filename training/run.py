"""Training runs, top to bottom: a recogniser, recognisers to compare, a detector; and what a run is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from models.detection import Detector
from models.pack import DetectionSpec, sha256_of
from training import distributed, plots
from training.backbones import build_backbone
from training.benchmarks import judge_bin, load_lfw_crops
from training.compare import Cells, judged, markdown, own_angle_rows, own_angles, remember, remembered, write_table
from training.config import RunConfig
from training.data.identities import load_identities
from training.data.verification import read_bin
from training.detection.data import load_annotated
from training.detection.fit import DETECTOR_CHECKPOINT, DetectorLoopConfig, fit_detector
from training.detection.network import FaceDetector
from training.evaluate import PARTS, VIEW1
from training.finished import embedder, load_run
from training.html_report import gather, headline_rows, write_report
from training.loop import Checkpoint, Judge, fit
from training.losses import build_head
from training.objective import build_objective, check_objective
from training.recipes import compared
from training.run_folder import CHECKPOINT, LOSSES, averaged_weights, load_checkpoint, record_config


def train_recogniser(config: RunConfig, detector: Detector | None = None) -> Checkpoint:
    """Learn (or resume) a recogniser; ``detector`` is needed only for photos that are not aligned crops."""
    check_objective(config)
    torch.manual_seed(config.loop.seed)
    if distributed.rank() == 0:
        record_config(config.output, config.as_dict(), config.output / CHECKPOINT, free=("epochs", "root", "output"))
        # Decoded once; the other ranks wait for the cache.
        load_identities(config.data, config.output.parent / "cache", detector)
    distributed.barrier()
    data = load_identities(config.data, config.output.parent / "cache", detector)
    backbone = build_backbone(config.backbone)
    objective = build_objective(config, data.num_classes)
    judge = judge_of(config.validation) if distributed.rank() == 0 else None
    checkpoint = fit(backbone, objective, data, config, judge)
    if distributed.rank() == 0:
        (config.output / "losses.png").write_bytes(plots.png(plots.loss_curves(config.output / LOSSES)))
    return checkpoint


def judge_of(validation: Sequence[Path]) -> Judge | None:
    """Ten-fold accuracy on each .bin set, by its name."""
    if not validation:
        return None
    sets = {path.stem: read_bin(path) for path in validation}

    def judge(network: nn.Module) -> dict[str, float]:
        return {f"{name} accuracy": judge_bin(embedder(network), pairs).accuracy.mean for name, pairs in sets.items()}

    return judge


def compare(losses: Sequence[str], data: Path, output: Path, detection: DetectionSpec, epochs: int, people: int) -> str:
    """Run the papers' losses one after the other (those judged before are not run again) and judge each on LFW,
    aligned by this detector; the table grows in ``output`` run by run and is returned."""
    crops = load_lfw_crops(data / "lfw", detection, output / "cache", ("view1", "view2"))
    detector = sha256_of(detection.path)
    rows: list[Cells] = []
    for loss in losses:
        config = compared(loss, data / "celeba", output / loss, epochs, people)
        row = remembered(config, detector)
        if row is None:
            finished = train_recogniser(config)
            row = judged(config, embedder(finished.backbone), finished.head.class_weights(), crops)
            remember(config, detector, row)
        rows.append(row)
        write_table(rows, output)
    return markdown(rows)


def train_detector(data: Path, output: Path, loop: DetectorLoopConfig, start_from: Path | None = None) -> FaceDetector:
    """Learn (or resume) the detector from ``data``/wider's training photos and ``data``/scenes; ``start_from`` is an
    earlier run whose averaged weights are the beginning."""
    torch.manual_seed(loop.seed)
    record_config(output, asdict(loop), output / DETECTOR_CHECKPOINT, free=("steps",))
    model = FaceDetector()
    if start_from is not None:
        model.load_state_dict(averaged_weights(start_from / DETECTOR_CHECKPOINT))
    photos = load_annotated(data / "wider", "train") + load_annotated(data / "scenes")
    return fit_detector(model, photos, loop, output)


def report_run(
    run: Path, data: Path, detection: DetectionSpec, report: Path | None, flip: bool = False, view1: bool = False
) -> list[tuple[str, str]]:
    """Judge a run on LFW (``data``/lfw, aligned by this detector) and return its figures; write them, with curves,
    worst pairs and sample crops, as HTML."""
    config, backbone = load_run(run)
    parts = VIEW1 if view1 else PARTS
    crops = load_lfw_crops(data / "lfw", detection, run.parent / "cache", parts)
    evidence = gather(embedder(backbone), crops, flip)
    trained_on = load_identities(config.data, config.output.parent / "cache")
    head = build_head(config.head, config.backbone.embedding_dim, trained_on.num_classes)
    head.load_whole_state(load_checkpoint(run / CHECKPOINT)["head"])
    own = own_angles(embedder(backbone), trained_on, head.class_weights())
    about = [("Head", _described(config)), *own_angle_rows(own)]
    if report is not None:
        write_report(report, f"Run {config.name}", about, run / LOSSES, evidence, trained_on.crops_NHWC)
    return [*about, *((name, value) for name, value, _ in headline_rows(evidence.judgement))]


def _described(config: RunConfig) -> str:
    options = ", ".join(f"{k}={v}" for k, v in config.head.options.items())
    terms = "".join(f" + {t.weight:g} {t.name}" for t in config.terms)
    return f"{config.head.name}{f' ({options})' if options else ''}{terms}"

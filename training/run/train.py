"""Training run of a recognizer, from top to bottom."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from models.vision.alignment import realign_crops, standard_alignment
from models.vision.detection import Detector
from training import distributed
from training.backbones import build_backbone
from training.config import ConfigError, RunConfig
from training.data.identities import IdentitySet, PhotoFiles, load_identities
from training.data.split import split_identities
from training.data.verification import read_bin
from training.evaluation import plots
from training.evaluation.benchmarks import evaluate_bin
from training.evaluation.embedding import shared_embedder, teacher_embeddings
from training.losses.core import Head
from training.optimization.logs import Measured
from training.optimization.loop import Checkpoint, Validator, fit
from training.optimization.objective import build_losses, build_objective
from training.optimization.run_folder import (
    CHECKPOINT,
    LOSSES,
    PEOPLE,
    WORST_PAIRS,
    load_checkpoint,
    load_run,
    write_run_config,
)
from training.optimization.sharded import read_class_weights
from training.run.people import HeldOut, figures_of, write_worst_pairs

log = logging.getLogger(__name__)
MUTABLE_SETTINGS = ("epochs", "root", "output", "workers", "sharded_checkpoint", "wandb")
"""Settings that may change between stop and resumption."""


def train_recognizer(config: RunConfig, detector: Detector | None = None) -> Checkpoint:
    """Train or resume a recognizer. ``detector`` is needed for unaligned photos only."""
    if config.imported:
        raise ConfigError(
            f"{config.output} has imported weights. Start a run by --set backbone.weights={config.output}"
        )
    build_losses(config, num_classes=64)  # reports wrong settings before the photos are read
    torch.manual_seed(config.loop.seed)
    cache = config.output.parent / "cache"
    if distributed.rank() == 0:
        write_run_config(config.output, config.as_dict(), config.output / CHECKPOINT, mutable=MUTABLE_SETTINGS)
        # Fill the cache before the other ranks read it.
        load_identities(config.data, cache, detector)
    distributed.barrier()
    split = split_identities(load_identities(config.data, cache, detector), config.data, config.loop.seed)
    data = split.train
    named = isinstance(data.listed.source, PhotoFiles)
    if named and distributed.rank() == 0 and not (config.output / CHECKPOINT).exists():
        (config.output / PEOPLE).write_text(json.dumps(data.names), encoding="utf-8")
    backbone = build_backbone(config.backbone, config.data.crop_px)
    taught_ND = None if config.distill.teacher is None else teacher_embeddings(config.distill.teacher, data)
    objective = build_objective(config, data.num_classes, taught_ND)
    if config.backbone.weights is not None and not (config.output / CHECKPOINT).exists():
        start_from(config.backbone.weights, backbone, objective.head, data)
    held_out = HeldOut(split)
    checkpoint = fit(backbone, objective, data, config, build_validator(config, held_out))
    measured = held_out.measure(shared_embedder(checkpoint.backbone), intervals=False)
    if distributed.rank() == 0:
        (config.output / "losses.png").write_bytes(plots.png(plots.loss_curves(config.output / LOSSES)))
        write_worst_pairs(config.output / WORST_PAIRS, measured)
    return checkpoint


def start_from(run: Path, backbone: nn.Module, head: Head, data: IdentitySet) -> None:
    """Give a new run the network of another, and its class centers if they can be those of ``data``: as many, and not
    known to be of other people. Collective. Raises ConfigError if the other run has another network."""
    _, network = load_run(run)
    try:
        backbone.load_state_dict(network.state_dict())
    except RuntimeError as error:
        raise ConfigError(f"backbone.weights: {run} has another network, see its config.json: {error}") from error
    checkpoint, state = load_checkpoint(run / CHECKPOINT), head.full_state()
    centers_CD, classes = read_class_weights(run, checkpoint), checkpoint.get("classes")
    if centers_CD is None or "weight" not in state:
        return
    others = classes is not None and not np.array_equal(classes.numpy(), data.class_ids)
    if others or centers_CD.shape != state["weight"].shape:
        log.info("the %d class centers of %s are of other people, and not used", len(centers_CD), run)
    else:
        head.load_full_state({**state, "weight": centers_CD})
        log.info("started with the %d class centers of %s", len(centers_CD), run)


def build_validator(config: RunConfig, held_out: HeldOut) -> Validator | None:
    """Return a function that computes the ten-fold accuracy on each .bin set, by name, and the figures of the people
    and photos that are held out, with intervals at the end. Crops of .bin sets are scaled to those of the run.
    Collective: each rank embeds its share."""
    if not config.validation and not held_out:
        return None
    alignment = standard_alignment(config.data.crop_px)
    read = {path.stem: read_bin(path) for path in config.validation}
    sets = {name: replace(pairs, crops_NHWC=realign_crops(pairs.crops_NHWC, alignment)) for name, pairs in read.items()}

    def validate(network: nn.Module, ended: bool) -> dict[str, Measured]:
        embed = shared_embedder(network)
        figures: dict[str, Measured] = {
            f"{name} accuracy": evaluate_bin(embed, pairs).accuracy.mean for name, pairs in sets.items()
        }
        return figures | figures_of(held_out.measure(embed, ended))

    return validate

"""Training run of a recognizer, from top to bottom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.vision.alignment import realign_crops, standard_alignment
from models.vision.detection import Detector
from training import distributed
from training.backbones import build_backbone
from training.config import RunConfig
from training.data.identities import hold_out, load_identities
from training.data.split import split_identities
from training.data.verification import read_bin
from training.evaluation import plots
from training.evaluation.benchmarks import evaluate_bin
from training.evaluation.embedding import shared_embedder
from training.optimization.logs import Measured
from training.optimization.loop import Checkpoint, Validator, fit, to_tensor
from training.optimization.objective import Objective, build_losses, build_objective
from training.optimization.run_folder import CHECKPOINT, LOSSES, WORST_PAIRS, write_run_config
from training.run.people import HeldOut, figures_of, write_worst_pairs

MUTABLE_SETTINGS = ("epochs", "root", "output", "workers", "sharded_checkpoint")
"""Settings that may change between stop and resumption."""


def train_recognizer(config: RunConfig, detector: Detector | None = None) -> Checkpoint:
    """Train or resume a recognizer. ``detector`` is needed for unaligned photos only."""
    build_losses(config, num_classes=64)  # reports wrong settings before the photos are read
    torch.manual_seed(config.loop.seed)
    cache = config.output.parent / "cache"
    if distributed.rank() == 0:
        write_run_config(config.output, config.as_dict(), config.output / CHECKPOINT, mutable=MUTABLE_SETTINGS)
        # Fill the cache before the other ranks read it.
        load_identities(config.data, cache, detector)
    distributed.barrier()
    split = split_identities(load_identities(config.data, cache, detector), config.data, config.loop.seed)
    data, taught = hold_out(split.train, config.distill.held_out, config.loop.seed)
    backbone = build_backbone(config.backbone, config.data.crop_px)
    objective = build_objective(config, data.num_classes)
    held_out = HeldOut(split)
    validate = build_validator(config, objective, taught, held_out)
    checkpoint = fit(backbone, objective, data, config, validate)
    measured = held_out.measure(shared_embedder(checkpoint.backbone), intervals=False)
    if distributed.rank() == 0:
        (config.output / "losses.png").write_bytes(plots.png(plots.loss_curves(config.output / LOSSES)))
        write_worst_pairs(config.output / WORST_PAIRS, measured)
    return checkpoint


def build_validator(
    config: RunConfig, objective: Objective, taught: NDArray[np.uint8], held_out: HeldOut
) -> Validator | None:
    """Return a function that computes the ten-fold accuracy on each .bin set, by name, the figures of the people and
    photos that are held out, with intervals at the end, and the distillation loss of the crops ``taught``. Crops of
    .bin sets are scaled to those of the run. Collective: each rank embeds its share."""
    distillation = objective.distillation if len(taught) else None
    if not config.validation and distillation is None and not held_out:
        return None
    alignment = standard_alignment(config.data.crop_px)
    read = {path.stem: read_bin(path) for path in config.validation}
    sets = {name: replace(pairs, crops_NHWC=realign_crops(pairs.crops_NHWC, alignment)) for name, pairs in read.items()}

    def validate(network: nn.Module, ended: bool) -> dict[str, Measured]:
        embed = shared_embedder(network)
        figures: dict[str, Measured] = {
            f"{name} accuracy": evaluate_bin(embed, pairs).accuracy.mean for name, pairs in sets.items()
        }
        figures |= figures_of(held_out.measure(embed, ended))
        if distillation is not None:
            own = taught[distributed.split_evenly(len(taught), distributed.rank(), distributed.world_size())]
            total = distillation.total(network, to_tensor(own, next(network.parameters()).device))
            figures["held-out distillation loss"] = float(distributed.all_reduce_sum(total)) / len(taught)
        return figures

    return validate

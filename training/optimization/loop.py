"""Training loop: reproducible, resumable (bit for bit in one CPU process), on any number of ranks."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training import distributed
from training.backbones import checkpoint_blocks, synchronize_batch_norm
from training.config import ConfigError, LoopConfig, RunConfig, TrainingPrecision
from training.data.augment import augment, draw_uniforms, morph, select_morphed
from training.data.identities import IdentitySet
from training.data.sampling import BatchSampler
from training.losses import Head
from training.optimization.logs import RunLog
from training.optimization.objective import Objective
from training.optimization.run_folder import CHECKPOINT
from training.optimization.state import NonFiniteLossError, TrainingState

log = logging.getLogger(__name__)
SAVE_CHECK_INTERVAL_STEPS = 20
"""Interval at which ranks agree whether to save; each check costs a round trip."""
Validator = Callable[[nn.Module], Mapping[str, float]]
"""Function from a network in evaluation mode to figures by name."""


@dataclass
class Checkpoint:
    """Result of a run. ``backbone`` holds the EMA weights."""

    backbone: nn.Module
    head: Head
    step: int
    loss: float
    path: Path


def fit(
    backbone: nn.Module, objective: Objective, data: IdentitySet, config: RunConfig, validate: Validator | None = None
) -> Checkpoint:
    """Train, resuming from ``output/checkpoint.pt`` if it exists.

    Every step depends only on the last weights, the seed and the step number, so a resumed run repeats the losses of an
    uninterrupted one. ``validate`` is called after every epoch. Raises NonFiniteLossError if the loss or its gradient
    is NaN or infinite; the last checkpoint is kept. Raises ConfigError if the batch does not divide by the ranks, or
    exceeds the data.
    """
    loop, path = config.loop, config.output / CHECKPOINT
    device = distributed.device()
    state = TrainingState(backbone, objective, loop, device)
    if state.restore(path):
        log.info("resumed %s at step %d", path, state.step)
    sampler = BatchSampler(data.labels, loop.batch_size, loop.seed, config.data.images_per_person, data.repeats)
    total_steps = sampler.steps_per_epoch * loop.epochs
    if max(loop.warmup_steps, loop.margin_warmup_steps) >= total_steps:
        log.warning("warm-up exceeds the run's %d steps: the full rate or margin is not reached", total_steps)
    own = _rank_slice(loop.batch_size)
    crops = data.crops_NHWC if device.type == "cpu" else _copy_if_it_fits(data.crops_NHWC, device)
    network = _prepare_network(state.backbone, loop, device)
    autocast = torch.autocast(device.type, _dtype(loop.precision), enabled=_uses_autocast(loop.precision))
    backbone.train()
    objective.train()
    last_saved = time.monotonic()
    with RunLog(config.output, state.step, total_steps, loop.batch_size, silent=distributed.rank() > 0) as run_log:
        while state.step < total_steps:
            batch_number = _batch_number(state.step, sampler.steps_per_epoch, config)
            epoch, position = divmod(batch_number, sampler.steps_per_epoch)
            rows = sampler.rows(epoch, position)
            torch.manual_seed(_step_seed(loop.seed, state.step))
            uniforms = draw_uniforms(loop.batch_size, loop.seed, batch_number)[own].to(device)
            images = morph(
                augment(to_tensor(crops[rows[own]], device), uniforms, config.augment), uniforms, config.augment
            )
            labeled = ~select_morphed(uniforms, config.augment) if config.augment.morph else None
            labels = torch.from_numpy(data.labels[rows[own]]).to(device)
            rate = learning_rate(state.step, total_steps, loop)
            objective.head.margin_share = margin_share(state.step, loop)
            with autocast:
                embeddings = network(images.contiguous(memory_format=torch.channels_last))
            parts = objective(embeddings, labels, images, labeled, batch_number)
            loss = torch.stack(list(parts.values())).sum()
            values = {"loss": _mean_over_ranks(loss), "learning_rate": rate, **_logged_values(parts, objective.head)}
            if not math.isfinite(values["loss"]):
                raise NonFiniteLossError(_diagnose(state, rows[own], embeddings, parts))
            state.update(loss, rate)
            state.loss = values["loss"]
            run_log.add(state.step, values)
            if state.step % sampler.steps_per_epoch == 0 and validate is not None and distributed.rank() == 0:
                run_log.log_validation(state.step, validate(state.averaged.eval()))
            if _time_to_save(state.step, time.monotonic() - last_saved > loop.checkpoint_seconds):
                state.save(path)
                last_saved = time.monotonic()
    state.save(path)
    return Checkpoint(state.averaged.eval(), objective.head.eval(), state.step, state.loss, path)


def _batch_number(step: int, steps_per_epoch: int, config: RunConfig) -> int:
    """Return the step whose images this step shows: an earlier one if batches repeat."""
    views = config.distill.views
    return step % (steps_per_epoch * views) if views else step


def _time_to_save(step: int, due: bool) -> bool:
    return (
        due
        if distributed.world_size() == 1
        else step % SAVE_CHECK_INTERVAL_STEPS == 0 and distributed.broadcast_decision(due)
    )


def learning_rate(step: int, total_steps: int, config: LoopConfig) -> float:
    """Return the rate: linear warm-up, then half a cosine or (1 - progress)^poly_power down to zero."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    match config.schedule:
        case "cosine":
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        case "poly":
            return float(config.learning_rate * (1 - min(1.0, progress)) ** config.poly_power)


def margin_share(step: int, config: LoopConfig) -> float:
    """Return the share of the margin to apply, in [0, 1]."""
    return 1.0 if config.margin_warmup_steps == 0 else min(1.0, step / config.margin_warmup_steps)


def to_tensor(crops_NHWC: NDArray[np.uint8] | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Convert (n, 112, 112, 3) uint8 to (n, 3, 112, 112) float32 in [-1, 1]."""
    pixels = crops_NHWC if isinstance(crops_NHWC, Tensor) else torch.from_numpy(np.ascontiguousarray(crops_NHWC))
    return (pixels.to(device).permute(0, 3, 1, 2).float() - 127.5) / 127.5


def _uses_autocast(precision: TrainingPrecision) -> bool:
    return precision in ("bf16", "fp16") or (precision == "auto" and distributed.has_native_bf16())


def _dtype(precision: TrainingPrecision) -> torch.dtype:
    return torch.float16 if precision == "fp16" else torch.bfloat16


def _step_seed(seed: int, step: int) -> int:
    """Return the seed of torch's global generator (dropout, random margins, class sampling), distinct per rank."""
    # Add 1 to the rank: numpy ignores trailing zeros, so (7, 3) and (7, 3, 0) are the same seed.
    return int(np.random.SeedSequence((seed, step, distributed.rank() + 1)).generate_state(1)[0])


def _rank_slice(batch_size: int) -> slice:
    ranks = distributed.world_size()
    if batch_size % ranks:
        raise ConfigError(f"loop.batch_size {batch_size} does not divide by {ranks} ranks")
    return distributed.split_evenly(batch_size, distributed.rank(), ranks)


def _copy_if_it_fits(crops_NHWC: NDArray[np.uint8], device: torch.device) -> NDArray[np.uint8] | Tensor:
    """Copy the set to GPU memory if it needs less than half of the free memory."""
    free, _ = torch.cuda.mem_get_info(device)
    return copy_to_device(device, crops_NHWC) if crops_NHWC.nbytes < free / 2 else crops_NHWC


def copy_to_device(device: torch.device, crops_NHWC: NDArray[np.uint8], block: int = 4096) -> Tensor:
    """Copy a memory map in pieces, since it may exceed host memory."""
    copy = torch.empty(crops_NHWC.shape, dtype=torch.uint8, device=device)
    for start in range(0, len(crops_NHWC), block):
        copy[start : start + block] = torch.from_numpy(np.array(crops_NHWC[start : start + block]))
    return copy


def _prepare_network(backbone: nn.Module, config: LoopConfig, device: torch.device) -> nn.Module:
    """Apply checkpointing, sync batch norm, DDP and compile. State-dict keys of ``backbone`` stay the same."""
    if config.gradient_checkpointing:
        checkpoint_blocks(backbone)
    network = backbone
    if distributed.world_size() > 1:
        if config.sync_batch_norm:
            network = synchronize_batch_norm(network)
        network = DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)
    return torch.compile(network) if config.compile else network  # type: ignore[return-value]


def _mean_over_ranks(loss: Tensor) -> float:
    return float(distributed.all_reduce_sum(loss)) / distributed.world_size()


def _logged_values(parts: Mapping[str, Tensor], head: Head) -> dict[str, float]:
    batch_number = {} if len(parts) == 1 else {f"loss_{name}": _mean_over_ranks(part) for name, part in parts.items()}
    return {**batch_number, **head.log_values()}


def _diagnose(state: TrainingState, rows: NDArray[np.int64], embeddings: Tensor, parts: Mapping[str, Tensor]) -> str:
    named = [*state.backbone.named_parameters(), *state.objective.named_parameters()]
    broken = [name for name, p in named if not bool(torch.isfinite(p).all())]
    finite_B = torch.isfinite(embeddings).all(1).cpu().numpy()
    if not finite_B.all():
        broken.append(f"embeddings of rows {json.dumps(rows[~finite_B][:8].tolist())}")
    broken = broken or [f"the loss of {name}" for name, part in parts.items() if not bool(torch.isfinite(part))]
    cause = ", ".join(broken[:5]) or "another rank"
    return f"loss is not finite at step {state.step}: {cause}; first rows of the batch: {json.dumps(rows[:8].tolist())}"

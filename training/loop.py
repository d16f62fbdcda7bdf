"""The optimisation loop: reproducible, resumable to the bit on one CPU process, on any number of ranks."""

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
from training.backbones import checkpoint_blocks, synchronise
from training.config import ConfigError, LoopConfig, Precision, RunConfig
from training.data.augment import augment, draw, morph, morphed
from training.data.identities import IdentitySet
from training.data.sampling import BatchSampler
from training.logs import RunLog
from training.losses import Head
from training.objective import Objective
from training.run_folder import CHECKPOINT
from training.state import NonFiniteLossError, TrainingState

log = logging.getLogger(__name__)
AGREE_EVERY = 20
"""Steps after which several ranks ask each other whether to save: asking costs a round trip."""
Judge = Callable[[nn.Module], Mapping[str, float]]
"""A network in evaluation mode to figures by name."""


@dataclass
class Checkpoint:
    """What a finished run knows. ``backbone`` holds the averaged weights."""

    backbone: nn.Module
    head: Head
    step: int
    loss: float
    path: Path


def fit(
    backbone: nn.Module, objective: Objective, data: IdentitySet, config: RunConfig, judge: Judge | None = None
) -> Checkpoint:
    """Train; resume from ``output/checkpoint.pt`` where it exists.

    Every step is a function of the last one's weights, the seed and the step's number, so that a run killed and
    resumed goes on with the losses of one that was not. ``judge`` is asked after every epoch.

    Raises:
        NonFiniteLossError: the loss or its gradient is NaN or infinite; the last checkpoint stays as it was.
        ConfigError: the batch cannot be dealt out, or the data is less than one batch.
    """
    loop, path = config.loop, config.output / CHECKPOINT
    device = distributed.device()
    state = TrainingState(backbone, objective, loop, device)
    if state.restore(path):
        log.info("resumed %s at step %d", path, state.step)
    sampler = BatchSampler(data.labels, loop.batch_size, loop.seed, config.data.images_per_person, data.repeats)
    total_steps = sampler.steps_per_epoch * loop.epochs
    if max(loop.warmup_steps, loop.margin_warmup_steps) >= total_steps:
        log.warning("the warm-up is longer than the run's %d steps: rate or margin will not be reached", total_steps)
    mine = _own_part(loop.batch_size)
    crops = data.crops_NHWC if device.type == "cpu" else _resident(data.crops_NHWC, device)
    network = _parallel(state.backbone, loop, device)
    autocast = torch.autocast(device.type, _dtype(loop.precision), enabled=_autocasts(loop.precision))
    backbone.train()
    objective.train()
    last_saved = time.monotonic()
    with RunLog(config.output, state.step, total_steps, loop.batch_size, silent=distributed.rank() > 0) as run_log:
        while state.step < total_steps:
            shown = _step_of_images(state.step, sampler.steps_per_epoch, config)
            epoch, position = divmod(shown, sampler.steps_per_epoch)
            rows = sampler.rows(epoch, position)
            torch.manual_seed(_seed_of_step(loop.seed, state.step))
            varied = draw(loop.batch_size, loop.seed, shown)[mine].to(device)
            images = morph(
                augment(to_tensor(crops[rows[mine]], device), varied, config.augment), varied, config.augment
            )
            labelled = ~morphed(varied, config.augment) if config.augment.morph else None
            labels = torch.from_numpy(data.labels[rows[mine]]).to(device)
            rate = learning_rate(state.step, total_steps, loop)
            objective.head.margin_share = margin_share(state.step, loop)
            with autocast:
                embeddings = network(images.contiguous(memory_format=torch.channels_last))
            parts = objective(embeddings, labels, images, labelled, shown)
            loss = torch.stack(list(parts.values())).sum()
            values = {"loss": _mean_over_ranks(loss), "learning_rate": rate, **_details(parts, objective.head)}
            if not math.isfinite(values["loss"]):
                raise NonFiniteLossError(_diagnose(state, rows[mine], embeddings, parts))
            state.update(loss, rate)
            state.loss = values["loss"]
            run_log.add(state.step, values)
            if state.step % sampler.steps_per_epoch == 0 and judge is not None and distributed.rank() == 0:
                run_log.judge(state.step, judge(state.averaged.eval()))
            if _time_to_save(state.step, time.monotonic() - last_saved > loop.checkpoint_seconds):
                state.save(path)
                last_saved = time.monotonic()
    state.save(path)
    return Checkpoint(state.averaged.eval(), objective.head.eval(), state.step, state.loss, path)


def _step_of_images(step: int, steps_per_epoch: int, config: RunConfig) -> int:
    """Whose images this step shows: its own, or those of an earlier one where batches recur."""
    views = config.distill.views
    return step % (steps_per_epoch * views) if views else step


def _time_to_save(step: int, due: bool) -> bool:
    return due if distributed.world_size() == 1 else step % AGREE_EVERY == 0 and distributed.agree(due)


def learning_rate(step: int, total_steps: int, config: LoopConfig) -> float:
    """Linear warm-up, then down to zero: half a cosine, or (1 - progress)^poly_power."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    match config.schedule:
        case "cosine":
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        case "poly":
            return float(config.learning_rate * (1 - min(1.0, progress)) ** config.poly_power)


def margin_share(step: int, config: LoopConfig) -> float:
    """How much of its margin the head applies, 0 to 1."""
    return 1.0 if config.margin_warmup_steps == 0 else min(1.0, step / config.margin_warmup_steps)


def to_tensor(crops_NHWC: NDArray[np.uint8] | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """(n, 112, 112, 3) uint8 to (n, 3, 112, 112) float32 in [-1, 1]."""
    pixels = crops_NHWC if isinstance(crops_NHWC, Tensor) else torch.from_numpy(np.ascontiguousarray(crops_NHWC))
    return (pixels.to(device).permute(0, 3, 1, 2).float() - 127.5) / 127.5


def _autocasts(precision: Precision) -> bool:
    return precision in ("bf16", "fp16") or (precision == "auto" and distributed.bf16_is_native())


def _dtype(precision: Precision) -> torch.dtype:
    return torch.float16 if precision == "fp16" else torch.bfloat16


def _seed_of_step(seed: int, step: int) -> int:
    """Of torch's global generator, which dropout, drawn margins and class sampling use; another one on each rank."""
    # A trailing zero would be no rank at all: (7, 3) and (7, 3, 0) are one sequence to numpy.
    return int(np.random.SeedSequence((seed, step, distributed.rank() + 1)).generate_state(1)[0])


def _own_part(batch_size: int) -> slice:
    ranks = distributed.world_size()
    if batch_size % ranks:
        raise ConfigError(f"loop.batch_size {batch_size} cannot be dealt out to {ranks} ranks evenly")
    return distributed.share(batch_size, distributed.rank(), ranks)


def _resident(crops_NHWC: NDArray[np.uint8], device: torch.device) -> NDArray[np.uint8] | Tensor:
    """The whole set in the accelerator's memory, if it takes less than half of what is free."""
    free, _ = torch.cuda.mem_get_info(device)
    return in_memory_of(device, crops_NHWC) if crops_NHWC.nbytes < free / 2 else crops_NHWC


def in_memory_of(device: torch.device, crops_NHWC: NDArray[np.uint8], at_once: int = 4096) -> Tensor:
    """Copy a memory map piece by piece: it may be larger than the host's memory."""
    there = torch.empty(crops_NHWC.shape, dtype=torch.uint8, device=device)
    for start in range(0, len(crops_NHWC), at_once):
        there[start : start + at_once] = torch.from_numpy(np.array(crops_NHWC[start : start + at_once]))
    return there


def _parallel(backbone: nn.Module, config: LoopConfig, device: torch.device) -> nn.Module:
    """The backbone as the loop calls it. Parameters and state-dict keys stay those of ``backbone``."""
    if config.gradient_checkpointing:
        checkpoint_blocks(backbone)
    network = backbone
    if distributed.world_size() > 1:
        if config.sync_batch_norm:
            network = synchronise(network)
        network = DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)
    return torch.compile(network) if config.compile else network  # type: ignore[return-value]


def _mean_over_ranks(loss: Tensor) -> float:
    return float(distributed.total(loss)) / distributed.world_size()


def _details(parts: Mapping[str, Tensor], head: Head) -> dict[str, float]:
    shown = {} if len(parts) == 1 else {f"loss_{name}": _mean_over_ranks(part) for name, part in parts.items()}
    return {**shown, **head.readings()}


def _diagnose(state: TrainingState, rows: NDArray[np.int64], embeddings: Tensor, parts: Mapping[str, Tensor]) -> str:
    named = [*state.backbone.named_parameters(), *state.objective.named_parameters()]
    broken = [name for name, p in named if not bool(torch.isfinite(p).all())]
    finite_B = torch.isfinite(embeddings).all(1).cpu().numpy()
    if not finite_B.all():
        broken.append(f"embeddings of rows {json.dumps(rows[~finite_B][:8].tolist())}")
    broken = broken or [f"the loss of {name}" for name, part in parts.items() if not bool(torch.isfinite(part))]
    where = ", ".join(broken[:5]) or "another rank's part"
    return (
        f"loss is not finite at step {state.step}: {where}; the batch begins with rows {json.dumps(rows[:8].tolist())}"
    )

"""Training loop: reproducible, resumable (bit for bit in one CPU process), on any number of ranks."""

from __future__ import annotations

import json
import logging
import math
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training import distributed
from training.backbones.checkpointing import checkpoint_blocks
from training.config import ConfigError, LoopConfig, RunConfig, TrainingPrecision
from training.data.augment import augment
from training.data.batches import Batch, Batches
from training.data.identities import IdentitySet
from training.errors import NON_FINITE_REMEDY, NonFiniteLossError, RunInterruptedError
from training.losses.core import Head
from training.optimization.health import RunHealth
from training.optimization.interrupts import stop_requests
from training.optimization.logs import Measured, RunLog, WandbLog
from training.optimization.monitor import Monitor, StepResult, angle_window, count_angles, measure_embeddings
from training.optimization.objective import Objective
from training.optimization.run_folder import CHECKPOINT, require_finite
from training.optimization.state import TrainingState

log = logging.getLogger(__name__)
SAVE_CHECK_INTERVAL_STEPS = 20
"""Interval at which ranks agree whether to save; each check costs a round trip."""
Validator = Callable[[nn.Module, bool], Mapping[str, Measured]]
"""Function from a network in evaluation mode, and whether the run is at its end, to figures by name."""


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
    uninterrupted one. ``validate`` is called after every epoch.

    Raises:
        NonFiniteLossError: the loss, its gradient, a validation figure or a value of the checkpoint is NaN or infinite;
            the last checkpoint is kept.
        RunInterruptedError: Ctrl-C or SIGTERM arrived; a checkpoint of the last step is saved.
        ConfigError: the batch does not divide by the ranks, or exceeds the data; or the checkpoint has other classes.
    """
    loop, path = config.loop, config.output / CHECKPOINT
    device = distributed.device()
    state = TrainingState(backbone, objective, loop, device, data)
    if state.restore(path):
        log.info("resumed %s at step %d", path, state.step)
    batches = Batches(data, config, _rank_slice(config), device)
    network = _prepare_network(state.backbone, loop, device)
    backbone.train()
    objective.train()
    monitor = Monitor(RunHealth(batches.total_steps, config.head, data.num_classes), device, state.scaler.is_enabled())
    silent, epoch_steps = distributed.rank() > 0, batches.steps_per_epoch
    mirror = WandbLog(config) if loop.wandb and not silent else None
    logs = RunLog(config.output, state.step, batches.total_steps, loop.batch_size, silent, epoch_steps, mirror)
    last_saved = time.monotonic()
    with closing(state), closing(logs), stop_requests() as stop_requested:
        for batch in batches.iterate(state.step):
            monitor.add(train_step(network, state, batch, config, batches.total_steps))
            end_of_epoch = state.step % batches.steps_per_epoch == 0
            save = _time_to_save(state.step, time.monotonic() - last_saved > loop.checkpoint_seconds)
            stop = _agree_to_stop(state.step, stop_requested()) and state.step < batches.total_steps
            if monitor.due or end_of_epoch or save or stop or state.step == batches.total_steps:
                monitor.flush(logs)
                state.loss = monitor.loss
            if end_of_epoch:
                _validate(state, validate, logs, state.step == batches.total_steps)
            if save or stop:
                state.save(path)
                last_saved = time.monotonic()
            if stop:
                raise RunInterruptedError(
                    f"stopped at step {state.step} of {batches.total_steps}. The checkpoint is saved. Resume with: "
                    f"kith-train resume {shlex.quote(str(config.output))}"
                )
        state.save(path)
    return Checkpoint(state.average().eval(), objective.head.eval(), state.step, state.loss, path)


def _validate(state: TrainingState, validate: Validator | None, logs: RunLog, ended: bool) -> None:
    """Log figures, which the ranks compute together. Collective: all ranks stop if a figure is NaN or infinite."""
    figures: Mapping[str, Measured] = {}
    if validate is not None:
        figures = validate(state.average().eval(), ended)
        logs.log_validation(state.step, figures)
    require_finite(figures, state.step)


def train_step(
    network: nn.Module, state: TrainingState, batch: Batch, config: RunConfig, total_steps: int
) -> StepResult:
    """Take one optimizer step. With ``loop.accumulate`` = n, gradients are the mean over n parts of the batch. On a
    CPU, raises NonFiniteLossError before anything changes if the loss is NaN or infinite."""
    loop, head, device = config.loop, state.objective.head, batch.labels.device
    torch.manual_seed(_step_seed(loop.seed, batch.step))
    images = augment(to_tensor(batch.crops, device), batch.uniforms, config.augment)
    rate = learning_rate(batch.step, total_steps, loop)
    head.margin_share = margin_share(batch.step, total_steps, loop)
    head.begin_step(batch.labels)
    state.begin_step(rate)
    dtype = torch.float16 if loop.precision == "fp16" else torch.bfloat16
    autocast = torch.autocast(device.type, dtype, enabled=_uses_autocast(loop.precision))
    means: dict[str, Tensor] = {}
    counts: list[Tensor] = []
    for i in range(loop.accumulate):
        part = distributed.split_evenly(len(images), i, loop.accumulate)
        inputs, labels = images[part].contiguous(memory_format=torch.channels_last), batch.labels[part]
        complete = i == loop.accumulate - 1
        several = isinstance(network, DistributedDataParallel)
        with network.no_sync() if several and not complete else nullcontext():  # type: ignore[operator]
            with autocast:
                embeddings = network(inputs)
            parts = state.objective(embeddings, labels, batch.rows[part])
            loss = torch.stack(list(parts.values())).sum()
            if device.type == "cpu" and not math.isfinite(float(distributed.all_reduce_sum(loss))):
                raise NonFiniteLossError(_diagnose(state, batch.rows[part], embeddings, parts))
            state.backward(loss / loop.accumulate, complete)
        measured = {
            "loss": loss,
            **({f"loss_{name}": value for name, value in parts.items()} if len(parts) > 1 else {}),
            **head.log_values(),
            **measure_embeddings(head, embeddings, labels),
        }
        if (
            angle_window(state.step + 1, total_steps)
            and (counted := count_angles(head, embeddings, labels)) is not None
        ):
            counts.append(counted)
        for name, value in measured.items():
            share = value.detach() / loop.accumulate
            means[name] = means[name] + share if i else share
    means |= state.apply()
    known = {"learning_rate": rate} | ({"margin_share": head.margin_share} if loop.margin_warmup else {})
    return StepResult(state.step, means, known, torch.stack(counts).sum(0) if counts else None)


def _time_to_save(step: int, due: bool) -> bool:
    return _ranks_meet(step) and distributed.any_rank(due)


def _agree_to_stop(step: int, requested: bool) -> bool:
    return _ranks_meet(step) and distributed.any_rank(requested)


def _ranks_meet(step: int) -> bool:
    return distributed.world_size() == 1 or step % SAVE_CHECK_INTERVAL_STEPS == 0


def learning_rate(step: int, total_steps: int, config: LoopConfig) -> float:
    """Return the rate: linear warm-up, then half a cosine or (1 - progress)^poly_power down to zero, or steps."""
    warmup = round(config.warmup * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    match config.schedule:
        case "cosine":
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        case "step":
            passed = sum(step >= share * total_steps for share in config.milestones)
            return config.learning_rate / 10.0**passed
        case "poly":
            return float(config.learning_rate * (1 - min(1.0, progress)) ** config.poly_power)


def margin_share(step: int, total_steps: int, config: LoopConfig) -> float:
    """Return the share of the margin to apply, in [0, 1]."""
    warmup = round(config.margin_warmup * total_steps)
    return 1.0 if warmup == 0 else min(1.0, step / warmup)


def to_tensor(crops_NHWC: NDArray[np.uint8] | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Convert (n, s, s, 3) uint8 to (n, 3, s, s) float32 in [-1, 1]."""
    pixels = crops_NHWC if isinstance(crops_NHWC, Tensor) else torch.from_numpy(np.ascontiguousarray(crops_NHWC))
    return (pixels.to(device).permute(0, 3, 1, 2).float() - 127.5) / 127.5


def _uses_autocast(precision: TrainingPrecision) -> bool:
    return precision in ("bf16", "fp16") or (precision == "auto" and distributed.has_native_bf16())


def _step_seed(seed: int, step: int) -> int:
    """Return the seed of torch's global generator (dropout, random margins, class sampling), distinct per rank."""
    # Add 1 to the rank: numpy ignores trailing zeros, so (7, 3) and (7, 3, 0) are the same seed.
    return int(np.random.SeedSequence((seed, step, distributed.rank() + 1)).generate_state(1)[0])


def _rank_slice(config: RunConfig) -> slice:
    """Return this rank's images of a batch. All ranks have equally many."""
    ranks, size = distributed.world_size(), config.loop.batch_size
    if size % (ranks * config.loop.accumulate):
        raise ConfigError(f"loop.batch_size {size} does not divide by {ranks} ranks and loop.accumulate")
    return distributed.split_evenly(size, distributed.rank(), ranks)


def _prepare_network(backbone: nn.Module, config: LoopConfig, device: torch.device) -> nn.Module:
    """Apply checkpointing, sync batch norm, DDP and compile. State-dict keys of ``backbone`` stay the same.
    Convolutions use TF32 and the fastest algorithm for their shape. With autocast, matrix products of the losses use
    TF32, too, which has the 10 bits of fp16; bf16 has 7."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cuda.matmul.allow_tf32 = _uses_autocast(config.precision)
    if config.gradient_checkpointing:
        checkpoint_blocks(backbone)
    network = backbone
    if distributed.world_size() > 1 and config.sync_batch_norm:
        if device.type != "cuda":
            raise ConfigError("loop.sync_batch_norm needs a GPU for each rank. Set it to false")
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    if config.compile:
        network = torch.compile(network)  # type: ignore[assignment]
    if distributed.world_size() > 1:
        # Only the first rank's running statistics are used. A graph that stays the same needs no search for gradients
        # that are missing, but DDP supports it only without no_sync().
        network = DistributedDataParallel(
            network,
            device_ids=[device] if device.type == "cuda" else None,
            forward_sync_buffers=False,
            static_graph=config.accumulate == 1,
        )
    return network


def _diagnose(state: TrainingState, rows: NDArray[np.int64], embeddings: Tensor, parts: Mapping[str, Tensor]) -> str:
    named = [*state.backbone.named_parameters(), *state.objective.named_parameters()]
    broken = [name for name, p in named if not bool(torch.isfinite(p).all())]
    finite_B = torch.isfinite(embeddings).all(1).cpu().numpy()
    if not finite_B.all():
        broken.append(f"embeddings of rows {json.dumps(rows[~finite_B][:8].tolist())}")
    broken = broken or [f"the loss of {name}" for name, part in parts.items() if not bool(torch.isfinite(part))]
    cause = ", ".join(broken[:5]) or "another rank"
    first = json.dumps(rows[:8].tolist())
    return f"loss is not finite at step {state.step}: {cause}; first rows of the batch: {first}. {NON_FINITE_REMEDY}"

"""Training state at one step, in memory and on disk, independent of the number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from training import distributed
from training.config import ConfigError, LoopConfig
from training.data.identities import IdentitySet
from training.errors import RunError
from training.losses.partial_fc import PartialFC
from training.optimization.checkpoint_writer import CheckpointWriter, copy_to_host
from training.optimization.objective import Objective
from training.optimization.run_folder import check_classes, load_checkpoint, require_finite, save_atomically
from training.optimization.sharded import SHARDS, ShardsReference, load_shards, remove_old_shards, save_shards


class TrainingState:
    """Backbone, its EMA, objective, optimizer and loss scaler.

    Checkpoints need no random state: batches, augmentation and all other random numbers depend only on seed and step.
    ``data``: set whose classes a checkpoint must have; None skips this check.
    """

    def __init__(
        self,
        backbone: nn.Module,
        objective: Objective,
        config: LoopConfig,
        device: torch.device,
        data: IdentitySet | None = None,
    ) -> None:
        self.backbone = backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.averaged: nn.Module = copy.deepcopy(self.backbone).requires_grad_(False)
        self.objective = objective.to(device)
        self.config, self.data = config, data
        self.step = 0
        self.loss = float("nan")
        self.optimizer = _optimizer([*self.backbone.parameters(), *objective.parameters()], config)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        sharded = objective.head.head.weight if isinstance(objective.head, PartialFC) else None
        self._replicated = [p for p in objective.parameters() if p is not sharded]
        self._exchange = distributed.GradientMean(self._replicated)
        self._writer = CheckpointWriter(device)
        self._shards_group = distributed.new_cpu_group() if sharded is not None else None

    def begin_step(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Wait until the last checkpoint is written. Raises what prevented it."""
        self._writer.close()

    def backward(self, loss: Tensor, complete: bool = True) -> None:
        """Add the gradients of ``loss``. ``complete``: those of the step, which the ranks exchange."""
        self._exchange.complete = complete
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def apply(self) -> dict[str, Tensor]:
        """Clip, take one optimizer step, and return gradient norms and clip factors of backbone and head.

        In fp16, a step whose gradient is NaN or infinite is skipped, and the loss scale reduced. Otherwise the monitor
        stops the run.
        """
        head = self.objective.head
        sharded = [head.head.weight] if isinstance(head, PartialFC) else []
        self._exchange.wait()
        with head.optimizer_step(self.optimizer):
            self.scaler.unscale_(self.optimizer)
            groups = {"backbone": list(self.backbone.parameters()), "head": [*self._replicated, *sharded]}
            own = {"backbone": _norm(groups["backbone"], []), "head": _norm(self._replicated, sharded)}
            norms = {name: norm for name, norm in own.items() if norm is not None}
            limit = self.config.gradient_clip  # of each group: large gradients of the head do not slow the backbone
            factors = {name: (limit / norm).clamp(max=1.0) for name, norm in norms.items()} if limit else {}
            # Norms cover all ranks, so that either all of them step or none.
            if self.scaler.is_enabled() and not bool(torch.isfinite(torch.stack(list(norms.values()))).all()):
                self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
            else:
                for name in factors:
                    nn.utils.clip_grads_with_norm_(groups[name], limit, norms[name])
                self.scaler.step(self.optimizer)
                self.scaler.update()
        self.step += 1
        if self.config.ema_decay:
            update_ema(self.averaged, self.backbone, min(self.config.ema_decay, self.step / (self.step + 10)))
        named_norms = {f"gradient_{name}": norm for name, norm in norms.items()}
        return {**named_norms, **{f"clip_{name}": factor for name, factor in factors.items()}}

    def average(self) -> nn.Module:
        """Return the EMA network, up to date. Without EMA, it is copied only here. Collective: the statistics of batch
        norms are those of the first rank."""
        if not self.config.ema_decay:
            update_ema(self.averaged, self.backbone, 0.0)
        distributed.broadcast_buffers(self.averaged)
        return self.averaged

    def save(self, path: Path) -> None:
        """Copy the state, and write it atomically while training goes on. Collective: every rank must call it, and the
        first one writes, except for shards. Raises NonFiniteLossError if a value is NaN or infinite on any rank; the
        earlier checkpoint is kept. Raises on all ranks what prevented the checkpoint before; this one is written."""
        head = self.objective.head
        shards, tables, head_state = None, dict[str, Tensor](), {}
        if isinstance(head, PartialFC) and self.config.sharded_checkpoint:
            tables = head.own_tables()
            shards = ShardsReference(folder=f"{SHARDS}{self.step}", tables=list(tables))
            head_state = {name: value for name, value in head.head.state_dict().items() if name != "weight"}
        document = {
            "backbone": self.backbone.state_dict(),
            "averaged": self.average().state_dict(),
            "head": head_state if shards else head.full_state(),
            "shards": shards,
            "classes": None if self.data is None else torch.from_numpy(self.data.class_ids),
            "images": None if self.data is None else len(self.data),
            "terms": self.objective.terms.state_dict(),
            "distillation": None if self.objective.distillation is None else self.objective.distillation.state_dict(),
            "optimizer": self._optimizer_state(shards is not None),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "loss": self.loss,
        }
        require_finite({**document, "shards": tables}, self.step)
        failure = self._writer.wait()  # before copying: one copy at a time
        document = copy_to_host(document) if distributed.rank() == 0 else {}
        tables = copy_to_host(tables)

        def write() -> None:
            if shards is not None and isinstance(head, PartialFC):
                save_shards(path.parent / shards["folder"], tables, head.part, self._shards_group)
            if distributed.rank() == 0:
                save_atomically(path, document)
                remove_old_shards(path.parent, shards)

        self._writer.begin(write)
        if distributed.any_rank(failure is not None):
            raise failure or RunError("another rank could not write the checkpoint before. Its error says why")

    def restore(self, path: Path) -> bool:
        """Load a checkpoint, whole or in shards of any number of ranks. Return whether there was one. Raises
        ConfigError if it has other classes than the data, or shards that the head cannot load."""
        if not path.exists():
            return False
        head, state = self.objective.head, load_checkpoint(path)
        if self.data is not None:
            check_classes(state, self.data, path)
        self.backbone.load_state_dict(state["backbone"])
        self.averaged.load_state_dict(state["averaged"])
        shards: ShardsReference | None = state.get("shards")
        if shards is None:
            head.load_full_state(state["head"])
        elif isinstance(head, PartialFC):
            folder = path.parent / shards["folder"]
            head.load_own_tables(shards["tables"], lambda tables: load_shards(folder, tables, head.part))
            head.head.load_state_dict({**state["head"], "weight": head.head.weight.detach()})
        else:
            raise ConfigError(f"{path} has shards of classes. Resume it with loop.class_sampling")
        self.objective.terms.load_state_dict(state["terms"])
        if self.objective.distillation is not None:
            self.objective.distillation.load_state_dict(state["distillation"])
        self._load_optimizer(state["optimizer"], shards is None)
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.loss = int(state["step"]), float(state["loss"])
        return True

    def _optimizer_state(self, sharded: bool) -> dict[str, Any]:
        document = self.optimizer.state_dict()
        head = self.objective.head
        if isinstance(head, PartialFC):
            index = self._index_of(head.head.weight)
            slots = document["state"].get(index, {})
            rows = {} if sharded else head.full_optimizer_state()
            scalars = {k: v for k, v in slots.items() if not (isinstance(v, Tensor) and v.ndim == 2)}
            document["state"][index] = {**(scalars if sharded else slots), **rows}
        return document

    def _load_optimizer(self, document: dict[str, Any], whole: bool) -> None:
        head = self.objective.head
        if isinstance(head, PartialFC) and whole:
            slots = document["state"].get(self._index_of(head.head.weight), {})
            head.load_full_optimizer_state({k: v for k, v in slots.items() if isinstance(v, Tensor) and v.ndim == 2})
        self.optimizer.load_state_dict(document)

    def _index_of(self, parameter: nn.Parameter) -> int:
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        return next(i for i, p in enumerate(order) if p is parameter)


def _norm(replicated: list[nn.Parameter], sharded: list[nn.Parameter]) -> Tensor | None:
    """Return the gradient norm of a group over the classes of all ranks, or None without gradients."""
    own = [p.grad for p in replicated if p.grad is not None]
    norms = [nn.utils.get_total_norm(own)] if own else []
    if sharded:
        squares = torch.stack([p.grad.square().sum() for p in sharded if p.grad is not None]).sum()
        norms.append(distributed.all_reduce_sum(squares).sqrt())
    return torch.stack(norms).norm() if norms else None


def _optimizer(parameters: list[nn.Parameter], config: LoopConfig) -> torch.optim.Optimizer:
    """Build the optimizer. Weight decay excludes biases, batch norms and PReLU slopes."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    match config.optimizer:
        case "sgd":
            return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.momentum, 0.999))


@torch.no_grad()
def update_ema(averaged: nn.Module, model: nn.Module, decay: float) -> None:
    """Update the moving average of all floating tensors, including batch-norm statistics."""
    target, source = averaged.state_dict(), model.state_dict()
    floats = [name for name, value in target.items() if value.is_floating_point()]
    average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    average([target[n] for n in floats], [source[n] for n in floats], 0)
    for name in target.keys() - set(floats):
        target[name].copy_(source[name])

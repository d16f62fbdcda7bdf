"""What a run is at one step, on disk and in memory; the same whatever the number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training import distributed
from training.config import LoopConfig
from training.losses import PartialFC
from training.objective import Objective
from training.run_folder import load_checkpoint, save_atomically


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient became NaN or infinite; the message names step and cause."""


class TrainingState:
    """Backbone, its average, objective, optimiser and loss scaler, moved on by :meth:`update`.

    A checkpoint needs no random state beside it: batches, augmentation and every other draw are functions of the seed
    and the step.
    """

    def __init__(self, backbone: nn.Module, objective: Objective, config: LoopConfig, device: torch.device) -> None:
        self.backbone = backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.averaged = copy.deepcopy(self.backbone).requires_grad_(False)
        self.objective = objective.to(device)
        self.config = config
        self.step = 0
        self.loss = float("nan")
        self.optimiser = _optimiser([*self.backbone.parameters(), *objective.parameters()], config)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")

    def update(self, loss: Tensor, learning_rate: float) -> None:
        """One step down the gradient of ``loss``.

        Raises:
            NonFiniteLossError: the gradient is NaN or infinite; nothing has been changed. In fp16 such a step is left
                out instead, and the loss scaled down.
        """
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        head = self.objective.head
        split = [head.head.weight] if isinstance(head, PartialFC) else []
        replicated = [p for p in self.objective.parameters() if all(p is not s for s in split)]
        distributed.average_gradients(replicated)  # the backbone's are averaged by DistributedDataParallel
        with self.objective.head.stepping(self.optimiser):
            self.scaler.unscale_(self.optimiser)
            # Over all ranks, so that all of them step or none does.
            norm = self._clip([*self.backbone.parameters(), *replicated], split)
            if bool(torch.isfinite(norm)):
                self.scaler.step(self.optimiser)
                self.scaler.update()
            elif self.scaler.is_enabled():
                self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
            else:
                raise NonFiniteLossError(f"the gradient is not finite at step {self.step}: {self._broken_gradients()}")
        self.step += 1
        decay = min(self.config.ema_decay, self.step / (self.step + 10))
        update_average(self.averaged, self.backbone, decay)

    def _clip(self, replicated: list[nn.Parameter], split: list[nn.Parameter]) -> Tensor:
        """Scale all gradients so that their norm, over every rank's classes, is at most the configured one; return what
        it was."""
        norms = [nn.utils.get_total_norm([p.grad for p in replicated if p.grad is not None])]
        if split:
            own = torch.stack([p.grad.square().sum() for p in split if p.grad is not None]).sum()
            norms.append(distributed.total(own).sqrt())
        norm: Tensor = torch.stack(norms).norm()
        if bool(torch.isfinite(norm)):
            nn.utils.clip_grads_with_norm_([*replicated, *split], self.config.gradient_clip, norm)
        return norm

    def _broken_gradients(self) -> str:
        named = [*self.backbone.named_parameters(), *self.objective.named_parameters()]
        broken = [name for name, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        return ", ".join(broken[:5]) or "the classes of another rank"

    def save(self, path: Path) -> None:
        """Write atomically; every rank must call, the first writes."""
        document = {
            "backbone": self.backbone.state_dict(),
            "averaged": self.averaged.state_dict(),
            "head": self.objective.head.whole_state(),
            "terms": self.objective.terms.state_dict(),
            "distillation": None if self.objective.distillation is None else self.objective.distillation.state_dict(),
            "optimiser": self._optimiser_document(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "loss": self.loss,
        }
        if distributed.rank() == 0:
            save_atomically(path, document)

    def restore(self, path: Path) -> bool:
        """Return to a checkpoint, if there is one."""
        if not path.exists():
            return False
        state = load_checkpoint(path)
        self.backbone.load_state_dict(state["backbone"])
        self.averaged.load_state_dict(state["averaged"])
        self.objective.head.load_whole_state(state["head"])
        self.objective.terms.load_state_dict(state["terms"])
        if self.objective.distillation is not None:
            self.objective.distillation.load_state_dict(state["distillation"])
        self._load_optimiser(state["optimiser"])
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.loss = int(state["step"]), float(state["loss"])
        return True

    def _optimiser_document(self) -> dict[str, Any]:
        document = self.optimiser.state_dict()
        head = self.objective.head
        if isinstance(head, PartialFC):
            index = self._index_of(head.head.weight)
            document["state"][index] = {**document["state"].get(index, {}), **head.whole_slots()}
        return document

    def _load_optimiser(self, document: dict[str, Any]) -> None:
        head = self.objective.head
        if isinstance(head, PartialFC):
            slots = document["state"].get(self._index_of(head.head.weight), {})
            whole = {k: v for k, v in slots.items() if isinstance(v, Tensor) and v.ndim == 2}
            head.load_whole_slots(whole)
        self.optimiser.load_state_dict(document)

    def _index_of(self, parameter: nn.Parameter) -> int:
        order = [p for group in self.optimiser.param_groups for p in group["params"]]
        return next(i for i, p in enumerate(order) if p is parameter)


def _optimiser(parameters: list[nn.Parameter], config: LoopConfig) -> torch.optim.Optimizer:
    """Weight decay on matrices and kernels only: biases, batch norms and PReLU slopes are left free."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    match config.optimiser:
        case "sgd":
            return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.momentum, 0.999))


@torch.no_grad()
def update_average(averaged: nn.Module, model: nn.Module, decay: float) -> None:
    """Exponential moving average of every floating tensor, batch-norm statistics included."""
    target, source = averaged.state_dict(), model.state_dict()
    floats = [name for name, value in target.items() if value.is_floating_point()]
    torch._foreach_lerp_([target[n] for n in floats], [source[n] for n in floats], 1 - decay)
    for name in target.keys() - set(floats):
        target[name].copy_(source[name])

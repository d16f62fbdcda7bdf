"""Optimizer of the imitation: Muon for matrices, Adam for all other weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Descent:
    """Descent of a network's loss. Both rates fall linearly to zero.

    K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.

    Args:
        muon_rate: first learning rate of matrices.
        adam_rate: first learning rate of all other weights.
        weight_decay: of the matrices, per unit of the rate.
        steps: step at which the rates are zero.
        warmup: steps in which the rates rise to their first values.
    """

    def __init__(
        self,
        network: nn.Module,
        muon_rate: float,
        adam_rate: float,
        weight_decay: float,
        steps: int,
        warmup: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        matrices = [weight for weight in network.parameters() if weight.ndim == 2]
        others = [weight for weight in network.parameters() if weight.ndim != 2]
        muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=weight_decay)
        adam = torch.optim.Adam(others, lr=adam_rate, betas=betas)
        self._optimizers = (muon, adam)
        self._rates = (muon_rate, adam_rate)
        self._steps, self._warmup = steps, warmup

    def step(self, loss: Tensor, step: int) -> Tensor:
        """Take a step and return the loss, without waiting for a GPU."""
        loss.backward()  # type: ignore[no-untyped-call]
        share = min(1 - step / self._steps, (step + 1) / (self._warmup + 1))
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the moments, for a checkpoint."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from the moments of a checkpoint."""
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)

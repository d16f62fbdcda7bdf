"""Multiplicative margins of the original papers, with logits scaled by the feature length."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.losses.core import Head, cosine_matrix, upcast


def psi(cos_B: Tensor, m: int) -> Tensor:
    """Return psi(theta) = (-1)^k cos(m theta) - 2k for theta in [k pi/m, (k+1) pi/m].

    cos(m theta) is the Chebyshev polynomial T_m(cos theta), whose gradient is finite everywhere.
    """
    before_B, value_B = torch.ones_like(cos_B), cos_B
    for _ in range(m - 1):
        before_B, value_B = value_B, 2 * cos_B * value_B - before_B
    k_B = torch.floor(torch.arccos(cos_B.detach()) * m / math.pi).clamp(max=m - 1)
    return (1 - 2 * (k_B % 2)) * value_B - 2 * k_B


class LSoftmax(Head):
    """L-softmax, ||W|| ||x|| psi(theta): W. Liu et al., "Large-margin softmax", ICML 2016, section 3.

    The margin is annealed as in SphereFace's code: the target is (lambda cos(theta) + psi(theta)) / (1 + lambda) with
    lambda = max(lambda_min, lambda_start (1 + 0.12 t)^-1) after t steps. ``lambda_start=0`` disables annealing.
    """

    step: Tensor
    unit_weights = False

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        margin: int = 4,
        lambda_start: float = 1000.0,
        lambda_min: float = 5.0,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"a classifier needs at least 2 classes, not {num_classes}")
        if margin < 1:
            raise ValueError(f"the margin must be an integer of at least 1, not {margin}")
        if min(lambda_start, lambda_min) < 0:
            raise ValueError("lambda_start and lambda_min must not be negative")
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        nn.init.kaiming_normal_(self.weight)
        self.margin = margin
        self.lambda_start, self.lambda_min = lambda_start, lambda_min
        self.register_buffer("step", torch.tensor(0))

    def class_weights(self) -> Tensor | None:
        return self.weight

    def log_values(self) -> dict[str, Tensor | float]:
        return {"lambda": self.annealing_lambda}

    @property
    def annealing_lambda(self) -> float:
        return max(min(self.lambda_min, self.lambda_start), self.lambda_start / (1 + 0.12 * int(self.step)))

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            x_BD = upcast(embeddings_BD)
            lengths_BC = x_BD.norm(dim=1)[:, None]
            if not self.unit_weights:
                lengths_BC = lengths_BC * self.weight.to(x_BD.dtype).norm(dim=1)
            cos_BC = cosine_matrix(x_BD, self.weight)
            if self.training:
                self.step += 1
            index_B1 = labels_B[:, None]
            cos_B = cos_BC.gather(1, index_B1).squeeze(1)
            target_B = (self.annealing_lambda * cos_B + psi(cos_B, self.margin)) / (1 + self.annealing_lambda)
            return F.cross_entropy(lengths_BC * cos_BC.scatter(1, index_B1, target_B[:, None]), labels_B)


class ASoftmax(LSoftmax):
    """A-softmax, ||x|| psi(theta) with ||W|| = 1: W. Liu et al., "SphereFace", CVPR 2017, section 3."""

    unit_weights = True

"""Softmax over inner products, with and without a fixed feature length."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.bounds import l2_softmax_alpha_bound
from training.losses.core import Head, upcast


class Softmax(Head):
    """Softmax classifier, W^T x + b: L1 of ArcFace (J. Deng et al., CVPR 2019, eq. 1)."""

    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"a classifier needs at least 2 classes, not {num_classes}")
        self.classifier = nn.Linear(embedding_dim, num_classes)

    def class_weights(self) -> Tensor | None:
        return self.classifier.weight

    def features(self, embeddings_BD: Tensor) -> Tensor:
        return upcast(embeddings_BD)

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            x_BD = self.features(embeddings_BD)
            weight, bias = self.classifier.weight.to(x_BD.dtype), self.classifier.bias.to(x_BD.dtype)
            return F.cross_entropy(F.linear(x_BD, weight, bias), labels_B)


class L2Softmax(Softmax):
    """L2-softmax, W^T (alpha x/||x||) + b: R. Ranjan et al., "L2-constrained softmax loss", 2017.

    Args:
        alpha: length of every feature; 0 selects the lower bound for probability 0.9 (`bounds.l2_softmax_alpha_bound`).
    """

    def __init__(self, embedding_dim: int, num_classes: int, alpha: float = 0.0) -> None:
        super().__init__(embedding_dim, num_classes)
        if alpha < 0:
            raise ValueError(f"alpha must not be negative, but is {alpha}; 0 selects it automatically")
        self.alpha = alpha or l2_softmax_alpha_bound(num_classes, 0.9)

    def features(self, embeddings_BD: Tensor) -> Tensor:
        return self.alpha * F.normalize(upcast(embeddings_BD))

    def log_values(self) -> dict[str, Tensor | float]:
        return {"scale": self.alpha}

"""Softmax over inner products, with and without a fixed feature length."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training import distributed
from training.bounds import l2_softmax_alpha_bound
from training.losses.core import Head, cosine_matrix, upcast


class Softmax(Head):
    """Softmax classifier, W^T x + b: L1 of ArcFace (J. Deng et al., CVPR 2019, eq. 1)."""

    has_bias = True

    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"a classifier needs at least 2 classes, not {num_classes}")
        self.classifier = nn.Linear(embedding_dim, num_classes, bias=self.has_bias)

    def class_weights(self) -> Tensor | None:
        return self.classifier.weight

    def features(self, embeddings_BD: Tensor) -> Tensor:
        return upcast(embeddings_BD)

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            x_BD = self.features(embeddings_BD)
            logits_BC = F.linear(x_BD, self.classifier.weight.to(x_BD.dtype))
            if self.has_bias:
                logits_BC = logits_BC + self.classifier.bias.to(x_BD.dtype)
            return F.cross_entropy(logits_BC, labels_B)


class SoftmaxWithoutBias(Softmax):
    """Softmax classifier, W^T x: ArcFace, section 2.1; NormFace, section 3.1.

    A bias separates classes whose weights have one direction, which normalized embeddings cannot.
    """

    has_bias = False


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


class BatchCentroids(Head):
    """Congenerous cosine loss with centroids of the batch: Y. Liu et al., "Learning deep features via congenerous
    cosine loss for person recognition", 2017, section 3.

    The logits are s * cos(x, c_k). c_k is the mean embedding of person k in the global batch, with gradient. Needs
    batches with several images per person (data.images_per_person).
    """

    def __init__(self, embedding_dim: int, num_classes: int, scale: float = 10.0) -> None:
        super().__init__()
        if not scale > 0:
            raise ValueError(f"the scale s must be positive, not {scale}")
        self.scale = scale

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            x_AD = distributed.all_gather_own_grad(upcast(embeddings_BD))
            labels_A = distributed.all_gather(labels_B)
            same_AA = labels_A[:, None] == labels_A
            shares_AA = same_AA.to(x_AD.dtype) / same_AA.sum(1, keepdim=True)
            logits_AA = self.scale * cosine_matrix(x_AD, shares_AA @ x_AD)
            # The centroid of a person counts once, in the column of the person's first image.
            first_A = same_AA.int().argmax(1)
            repeated_A = first_A != torch.arange(len(labels_A), device=labels_A.device)
            return F.cross_entropy(logits_AA.masked_fill(repeated_A, -torch.inf), first_A)

    def log_values(self) -> dict[str, Tensor | float]:
        return {"scale": self.scale}

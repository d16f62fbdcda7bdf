"""Softmax over inner products, with and without a fixed feature length, and the multiplicative margins of the original
papers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training import distributed
from training.bounds import l2_softmax_alpha_bound
from training.errors import require
from training.losses.core import Head, clamp_cosines, cosine_matrix, require_classes, top_share


class Softmax(Head):
    """Softmax classifier, W^T x + b: L1 of ArcFace (J. Deng et al., CVPR 2019, eq. 1)."""

    has_bias = True

    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__()
        require_classes(num_classes)
        self.classifier = nn.Linear(embedding_dim, num_classes, bias=self.has_bias)

    def class_weights(self) -> Tensor | None:
        return self.classifier.weight

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        logits_BC = F.linear(x_BD, self.classifier.weight.to(x_BD.dtype))
        if self.has_bias:
            logits_BC = logits_BC + self.classifier.bias.to(x_BD.dtype)
        self.accuracy = top_share(logits_BC, labels_B)
        return F.cross_entropy(logits_BC, labels_B)


class SoftmaxWithoutBias(Softmax):
    """Softmax classifier, W^T x: ArcFace, section 2.1; NormFace, section 3.1. A bias separates classes whose weights
    have one direction, which normalized embeddings cannot."""

    has_bias = False


class L2Softmax(Softmax):
    """L2-softmax, W^T (alpha x/||x||) + b: R. Ranjan et al., "L2-constrained softmax loss", 2017. ``alpha``: length of
    every feature; 0 selects the lower bound for probability 0.9 (`bounds.l2_softmax_alpha_bound`)."""

    def __init__(self, embedding_dim: int, num_classes: int, alpha: float = 0.0) -> None:
        super().__init__(embedding_dim, num_classes)
        require(alpha >= 0, f"alpha must not be negative, but is {alpha}; 0 selects it automatically")
        self.alpha: Tensor
        length = alpha or l2_softmax_alpha_bound(num_classes, 0.9)
        self.register_buffer("alpha", torch.tensor(length, dtype=torch.float64), persistent=False)

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        return super().loss(self.alpha * F.normalize(x_BD), labels_B)

    def log_values(self) -> dict[str, Tensor]:
        return {"scale": self.alpha}


class BatchCentroids(Head):
    """Congenerous cosine loss with centroids of the batch: Y. Liu et al., "Learning deep features via congenerous
    cosine loss for person recognition", 2017, section 3.

    The logits are s * cos(x, c_k). c_k is the mean embedding of person k in the global batch, with gradient. Needs
    batches with several images per person (data.images_per_person).
    """

    def __init__(self, embedding_dim: int, num_classes: int, scale: float = 10.0) -> None:
        super().__init__()
        require(scale > 0, f"the scale s must be positive, not {scale}")
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(float(scale)), persistent=False)

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        x_AD, labels_A = distributed.all_gather_own_grad(x_BD), distributed.all_gather(labels_B)
        same_AA = labels_A[:, None] == labels_A
        shares_AA = same_AA.to(x_AD.dtype) / same_AA.sum(1, keepdim=True)
        logits_AA = self.scale * cosine_matrix(x_AD, shares_AA @ x_AD)
        # The centroid of a person counts once, in the column of the person's first image.
        first_A = same_AA.int().argmax(1)
        repeated_A = first_A != torch.arange(len(labels_A), device=labels_A.device)
        logits_AA = logits_AA.masked_fill(repeated_A, -torch.inf)
        self.accuracy = top_share(logits_AA, first_A)
        return F.cross_entropy(logits_AA, first_A)

    def log_values(self) -> dict[str, Tensor]:
        return {"scale": self.scale}


def psi(cos_B: Tensor, m: int) -> Tensor:
    """Return psi(theta) = (-1)^k cos(m theta) - 2k for theta in [k pi/m, (k+1) pi/m].

    cos(m theta) is the Chebyshev polynomial T_m(cos theta), whose gradient is finite everywhere.
    """
    before_B, value_B = torch.ones_like(cos_B), cos_B
    for _ in range(m - 1):
        before_B, value_B = value_B, 2 * cos_B * value_B - before_B
    k_B = torch.floor(torch.arccos(clamp_cosines(cos_B.detach())) * m / math.pi).clamp(max=m - 1)
    return (1 - 2 * (k_B % 2)) * value_B - 2 * k_B


class LSoftmax(Head):
    """L-softmax, ||W|| ||x|| psi(theta): W. Liu et al., "Large-margin softmax", ICML 2016, section 3.

    The target is (lambda cos(theta) + psi(theta)) / (1 + lambda), as in SphereFace's code, where 1 / (1 + lambda) grows
    linearly in steps until lambda is 5. Here it grows with the margin's share of the run (``loop.margin_warmup``).
    ``lambda_min``: lambda at the full margin, at least 0.
    """

    unit_weights = False

    def __init__(self, embedding_dim: int, num_classes: int, margin: int = 4, lambda_min: float = 5.0) -> None:
        super().__init__()
        require_classes(num_classes)
        require(margin >= 1, f"the margin must be an integer of at least 1, not {margin}")
        require(lambda_min >= 0, f"lambda_min must not be negative, but is {lambda_min}")
        self.weight = nn.Parameter(nn.init.kaiming_normal_(torch.empty(num_classes, embedding_dim)))
        self.margin, self.lambda_min = margin, lambda_min

    def class_weights(self) -> Tensor | None:
        return self.weight

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        lengths_BC = x_BD.norm(dim=1)[:, None]
        if not self.unit_weights:
            lengths_BC = lengths_BC * self.weight.to(x_BD.dtype).norm(dim=1)
        cos_BC = cosine_matrix(x_BD, self.weight)
        self.accuracy = top_share(lengths_BC * cos_BC, labels_B)
        index_B1 = labels_B[:, None]
        cos_B = cos_BC.gather(1, index_B1).squeeze(1)
        target_B = torch.lerp(cos_B, psi(cos_B, self.margin), self.margin_share / (1 + self.lambda_min))
        return F.cross_entropy(lengths_BC * cos_BC.scatter(1, index_B1, target_B[:, None]), labels_B)


class ASoftmax(LSoftmax):
    """A-softmax, ||x|| psi(theta) with ||W|| = 1: W. Liu et al., "SphereFace", CVPR 2017, section 3."""

    unit_weights = True

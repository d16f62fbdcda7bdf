"""Interface of all heads, and the cosine head.

Notation: x is an embedding, W_j the weight of class j, cos_BC the (batch, classes) matrix of their cosines, theta the
angles, y the target class. Losses run in float32 or float64 regardless of autocast, since 1 - 1e-7 rounds to 1 in
bfloat16. On a GPU with autocast, the loop lets their matrix products use TF32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from training import distributed
from training.errors import require

# Keeps arccos and sqrt(1 - c^2) away from c = +-1, where their gradients are infinite.
COSINE_EPS = 1e-7
MAX_OTHER_CLASSES = 1024
"""Classes to which angles are measured in each step. All of a million classes would cost as much as the loss."""


def upcast(values: Tensor) -> Tensor:
    """Convert to float32, unless already float32 or float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def clamp_cosines(cosines: Tensor) -> Tensor:
    """Clamp cosines to lie strictly inside (-1, 1)."""
    return cosines.clamp(-1 + COSINE_EPS, 1 - COSINE_EPS)


def cosine_matrix(rows_AD: Tensor, columns_BD: Tensor) -> Tensor:
    """Return (A, B) cosines of (A, d) and (B, d) vectors of any length."""
    return F.linear(F.normalize(upcast(rows_AD)), F.normalize(upcast(columns_BD)))


def half_angles(a_BD: Tensor, b_BD: Tensor) -> Tensor:
    """Return the (B,) angles in radians between the rows of two matrices, as 2 atan2(|a - b|, |a + b|) of unit vectors:
    near 0 and pi, a cosine rounds, and has lost the angle. Where it is 0 or pi, the gradient is 0."""
    a_BD, b_BD = F.normalize(upcast(a_BD), dim=-1), F.normalize(upcast(b_BD), dim=-1)
    return 2 * torch.atan2((a_BD - b_BD).norm(dim=-1), (a_BD + b_BD).norm(dim=-1))


def angle_matrix(rows_AD: Tensor, columns_BD: Tensor) -> Tensor:
    """Return (A, B) angles in radians, by float64, whose cosines still tell an angle of 1e-6 from 0."""
    cos_AB = F.linear(F.normalize(rows_AD.double()), F.normalize(columns_BD.double()))
    return torch.arccos(cos_AB.clamp(-1 + 1e-15, 1 - 1e-15)).to(upcast(rows_AD).dtype)


def mean_angle_deg(a_BD: Tensor, b_BD: Tensor) -> Tensor:
    """Return the mean angle in degrees between the rows of two (B, d) matrices."""
    return torch.rad2deg(half_angles(a_BD, b_BD)).mean()


def require_classes(num_classes: int) -> None:
    require(num_classes >= 2, f"a classifier needs at least 2 classes, not {num_classes}")


def require_option(value: str, kind: Any, name: str) -> None:
    """Raise ValueError unless ``value`` is one of the literals of ``kind``."""
    require(value in get_args(kind), f"{name} must be one of {get_args(kind)}, not {value!r}")


class Head(nn.Module, ABC):
    """Loss over embeddings and labels. ``margin_share`` in [0, 1] scales the margin; the loop raises it during margin
    warm-up."""

    margin_share: float = 1.0
    shardable = False
    """True if classes interact only in the sum of the softmax, so that they can be split over ranks."""
    gets_global_batch = False
    """True if batches given to this head already hold the samples of all ranks."""
    accuracy: Tensor | None = None
    """Share of the last training batch whose class had the highest logit without margin, in [0, 1]; the mean over ranks
    is that of the global batch. None before a batch, and for a head without classes."""

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return the scalar loss of (B, d) embeddings, normalized or not, and (B,) class indices."""
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            return self.loss(upcast(embeddings_BD), labels_B)

    @abstractmethod
    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return the loss of float32 or float64 embeddings, without autocast."""

    def class_weights(self) -> Tensor | None:
        """Return (C, d) class weights of any length, or None for a head without classes."""
        return None

    def begin_step(self, labels_B: Tensor) -> None:
        """Prepare for the labels of a step, whose batch may follow in parts. Collective."""

    @torch.no_grad()
    def target_angle_deg(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor | None:
        """Return the mean angle between embeddings and their class weight; None for a head without classes."""
        weights_CD = self.class_weights()
        return None if weights_CD is None else mean_angle_deg(upcast(embeddings_BD), upcast(weights_CD[labels_B]))

    @torch.no_grad()
    def angles_deg(self, embeddings_BD: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (B,) angles to the weight of the own class, and (B, K) angles to K evenly spaced classes.

        K is at most MAX_OTHER_CLASSES. The angle to the own class is NaN among the K. None for a head without classes,
        and for one that holds only a sample of them.
        """
        weights_CD = self.class_weights()
        if weights_CD is None:
            return None
        x_BD, weights_CD = upcast(embeddings_BD), upcast(weights_CD)
        step = -(-len(weights_CD) // MAX_OTHER_CLASSES)
        classes_K = torch.arange(0, len(weights_CD), step, device=labels_B.device)
        cos_BK = cosine_matrix(x_BD, weights_CD[::step]).masked_fill(labels_B[:, None] == classes_K, torch.nan)
        own_B, others_BK = half_angles(x_BD, weights_CD[labels_B]), torch.arccos(clamp_cosines(cos_BK))
        return torch.rad2deg(own_B), torch.rad2deg(others_BK)

    def optimizer_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context manager that wraps the optimizer's step."""
        return nullcontext()

    def full_state(self) -> dict[str, Tensor]:
        """Return the state of all classes, independent of the number of ranks."""
        return self.state_dict()

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        self.load_state_dict(state)

    def log_values(self) -> dict[str, Tensor]:
        """Return scalars to log beside the loss, such as the scale. They stay on their device."""
        return {}

    def _all_gather(self, values_B: Tensor) -> Tensor:
        return values_B if self.gets_global_batch else distributed.all_gather(values_B)


def top_share(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    """Return the share of samples whose class has the highest logit."""
    return (logits_BC.detach().argmax(1) == labels_B).float().mean()


class NoHead(Head):
    """Head with zero loss, for training by terms or distillation only."""

    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__()

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        return x_BD.sum() * 0.0


class Agents(NoHead):
    """Class weights without a loss, for terms that compare embeddings with them: NormFace, section 3.3, agents."""

    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__(embedding_dim, num_classes)
        self.weight = _new_weight(num_classes, embedding_dim)

    def class_weights(self) -> Tensor | None:
        return self.weight


class CosineHead(Head):
    """Cosine classifier: cross-entropy of the logits s * margin(cos theta).

    Args:
        embedding_dim: d.
        num_classes: C, at least 2.
        scale: s > 0.
    """

    scale: Tensor
    shardable = True
    compares_samples = False
    """True if the target of a sample depends on the target cosines of the other samples of the batch."""
    interclass_filter: float = 0.0
    """Cosine above which other classes get the cosine 0, without gradient (Partial FC, section 3.3); 0: off."""

    def __init__(self, embedding_dim: int, num_classes: int, scale: float = 64.0) -> None:
        super().__init__()
        require_classes(num_classes)
        require(scale > 0, f"the scale s must be positive, not {scale}")
        self.weight = _new_weight(num_classes, embedding_dim)
        self.register_buffer("scale", torch.tensor(float(scale)))

    @property
    def num_classes(self) -> int:
        return self.weight.shape[0]

    def class_weights(self) -> Tensor | None:
        return self.weight

    def log_values(self) -> dict[str, Tensor]:
        return {"scale": self.scale}

    def cosines(self, embeddings_BD: Tensor) -> Tensor:
        """Return cos_BC."""
        return cosine_matrix(embeddings_BD, self.weight)

    def target_weights(self, embeddings_BD: Tensor, index_B: Tensor) -> Tensor:
        """Return the (B, d) weights whose cosines are those of the classes ``index_B``."""
        return self.weight[index_B]

    def update_statistics(self, cos_BC: Tensor, labels_B: Tensor, norms_B: Tensor) -> None:
        """Update running statistics from the batch. Called without gradient, in training only, before the logits."""

    def target_cosines(self, theta_B: Tensor, norms_B: Tensor) -> Tensor:
        """Return the (B,) values that replace the target cosines, from (B,) angles and lengths of x."""
        return torch.cos(theta_B)

    def non_target_cosines(self, cos_BC: Tensor, labels_B: Tensor) -> Tensor:
        """Return the (B, C) values that replace the cosines of the other classes."""
        return cos_BC

    def regularizer(self, norms_B: Tensor) -> Tensor | float:
        """Return a term added to the cross-entropy."""
        return 0.0

    def logits(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return (B, C) logits. A label of -1 means that the target class is on another rank (see partial_fc). The
        column of this label has no meaning, so that only its owner knows the target cosine."""
        cos_BC, norms_B = self.cosines(embeddings_BD), upcast(embeddings_BD).norm(dim=1)
        if self.training:
            with torch.no_grad():
                self.update_statistics(cos_BC, labels_B, norms_B)
                self.accuracy = self._measure_accuracy(cos_BC, labels_B)
        # No indexing by masks, whose size a GPU would have to report first.
        index_B1 = labels_B.clamp(min=0)[:, None]
        others_BC = self.non_target_cosines(cos_BC, labels_B)
        if self.interclass_filter:
            others_BC = others_BC.masked_fill(cos_BC > self.interclass_filter, 0.0)
        theta_B = self._target_angles(embeddings_BD, index_B1[:, 0], cos_BC.gather(1, index_B1).squeeze(1))
        if self.compares_samples and self.gets_global_batch:
            here_B = labels_B >= 0
            theta_B = torch.where(here_B, theta_B, distributed.all_reduce_sum(torch.where(here_B, theta_B, 0)))
        target_B1 = self.target_cosines(theta_B, norms_B)[:, None]
        target_B1 = torch.where(labels_B[:, None] >= 0, target_B1, others_BC.gather(1, index_B1))
        return self.scale * others_BC.scatter(1, index_B1, target_B1)

    def _target_angles(self, embeddings_BD: Tensor, index_B: Tensor, cos_B: Tensor) -> Tensor:
        """Return the exact angles of (B,) cosines. The gradient passes through the cosines: that of the chosen weights
        would need memory for all of them."""
        with torch.no_grad():
            theta_B = half_angles(embeddings_BD, self.target_weights(embeddings_BD, index_B))
            slope_B = -1 / theta_B.sin().clamp(min=10 * torch.finfo(theta_B.dtype).eps)
        return theta_B + slope_B * (cos_B - cos_B.detach())

    def _measure_accuracy(self, cos_BC: Tensor, labels_B: Tensor) -> Tensor:
        if not self.gets_global_batch:
            return top_share(cos_BC, labels_B)
        # The nearest class may be on another rank. Each sample counts on the rank that holds its class.
        top_B, index_B = cos_BC.max(1)
        right_B = (index_B == labels_B) & (top_B == distributed.all_reduce_max(top_B))
        return right_B.float().mean() * distributed.world_size()

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x_BD, labels_B), labels_B) + self.regularizer(x_BD.norm(dim=1))


def _new_weight(num_classes: int, embedding_dim: int) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(num_classes, embedding_dim), std=0.01))

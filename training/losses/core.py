"""What every head shares: the interface, and the cosine logits.

Notation: x is an embedding, W_j the weight of class j, cos_BC the (batch, classes) matrix of their cosines, theta the
angles, y the target class. A head turns embeddings and labels into one scalar loss. Everything runs in float32 (or
float64, if given that) whatever autocast does: 1 - 1e-7 is exactly 1 in bfloat16, and margins live in that gap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from training import distributed

# Keeps arccos and sqrt(1 - c^2) away from c = +-1, where their gradients are infinite.
COSINE_EPS = 1e-7


def wide(values: Tensor) -> Tensor:
    """At least float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def bounded(cosines: Tensor) -> Tensor:
    """Strictly inside (-1, 1)."""
    return cosines.clamp(-1 + COSINE_EPS, 1 - COSINE_EPS)


def cosine_matrix(rows_AD: Tensor, columns_BD: Tensor) -> Tensor:
    """(A, d) and (B, d), of any length, to their (A, B) cosines, strictly inside (-1, 1)."""
    return bounded(F.linear(F.normalize(wide(rows_AD)), F.normalize(wide(columns_BD))))


class Head(nn.Module, ABC):
    """A loss over embeddings and labels.

    ``margin_share`` in [0, 1] is how much of its margin a head applies; the loop lets it grow while training starts.
    """

    margin_share: float = 1.0
    shardable = False
    """Whether classes may be split over ranks: true where they meet only in the softmax's sum."""
    sees_all_ranks = False
    """Whether a batch given to this head already holds every rank's samples."""

    @abstractmethod
    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return the scalar loss. ``embeddings_BD`` need not be normalised; ``labels_B`` are class indices."""

    def class_weights(self) -> Tensor | None:
        """(C, d), of any length, or None where a head has no classes."""
        return None

    def stepping(self, optimiser: Optimizer) -> AbstractContextManager[None]:
        """Entered around the optimiser's step."""
        return nullcontext()

    def whole_state(self) -> dict[str, Tensor]:
        """The state of all classes, whatever the number of ranks."""
        return self.state_dict()

    def load_whole_state(self, state: dict[str, Tensor]) -> None:
        self.load_state_dict(state)

    def readings(self) -> dict[str, float]:
        """What the loop logs beside the loss: at least a scale, where there is one."""
        return {}

    def _of_all_ranks(self, values_B: Tensor) -> Tensor:
        return values_B if self.sees_all_ranks else distributed.gathered(values_B)


class NoHead(Head):
    """No classifier: for metric losses alone. The loss is zero."""

    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__()

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        return wide(embeddings_BD).sum() * 0.0


class CosineHead(Head):
    """Cosine classifier: logits are s * margin(cos theta), the loss is their cross-entropy.

    Args:
        embedding_dim: d.
        num_classes: C, at least 2.
        scale: s > 0.
    """

    scale: Tensor
    shardable = True

    def __init__(self, embedding_dim: int, num_classes: int, scale: float = 64.0) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"a classifier needs at least 2 classes, not {num_classes}")
        if not scale > 0:
            raise ValueError(f"the scale s must be positive, not {scale}")
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        nn.init.normal_(self.weight, std=0.01)
        self.register_buffer("scale", torch.tensor(float(scale)))

    @property
    def num_classes(self) -> int:
        return self.weight.shape[0]

    def class_weights(self) -> Tensor | None:
        return self.weight

    def readings(self) -> dict[str, float]:
        return {"scale": float(self.scale)}

    def cosines(self, embeddings_BD: Tensor) -> Tensor:
        """Return cos_BC, strictly inside (-1, 1)."""
        return cosine_matrix(embeddings_BD, self.weight)

    def observe(self, cos_BC: Tensor, labels_B: Tensor, norms_B: Tensor) -> None:
        """Update what a head knows of the batch, before its logits; called in training only, without gradient."""

    def target_cosines(self, cos_B: Tensor, norms_B: Tensor) -> Tensor:
        """Return what stands in the target's place: (B,) cosines and (B,) lengths of x to (B,)."""
        return cos_B

    def other_cosines(self, cos_BC: Tensor, labels_B: Tensor) -> Tensor:
        """Return what stands in the other classes' places."""
        return cos_BC

    def regulariser(self, norms_B: Tensor) -> Tensor | float:
        """What a head adds to the cross-entropy."""
        return 0.0

    def logits(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return (B, C) logits. Where ``labels_B`` is -1 the target is not among these classes (see partial_fc)."""
        cos_BC, norms_B = self.cosines(embeddings_BD), wide(embeddings_BD).norm(dim=1)
        if self.training:
            with torch.no_grad():
                self.observe(cos_BC, labels_B, norms_B)
        rows = (labels_B >= 0).nonzero().squeeze(1)
        columns = labels_B[rows]
        target_R = self.target_cosines(cos_BC[rows, columns], norms_B[rows])
        return self.scale * self.other_cosines(cos_BC, labels_B).index_put((rows, columns), target_R)

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            loss = F.cross_entropy(self.logits(embeddings_BD, labels_B), labels_B)
            return loss + self.regulariser(wide(embeddings_BD).norm(dim=1))

"""The cosine-logit core that every head shares.

Notation: x is an embedding, W_j the weight of class j, cos_BC the (batch, classes) matrix of their cosines, y the
target class. A head turns cosines into logits; the loss is cross-entropy over them. Everything here runs in float32
whatever autocast does: 1 - 1e-7 is exactly 1 in bfloat16, and margins live in that gap.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Keeps arccos and sqrt(1 - c^2) away from c = +-1, where their gradients are infinite.
COSINE_EPS = 1e-7


class CosineHead(nn.Module):
    """Cosine classifier: logits are s * margin(cos), the loss is their cross-entropy.

    Args:
        embedding_dim: d.
        num_classes: C, at least 2.
        scale: s > 0.
    """

    scale: Tensor

    def __init__(self, embedding_dim: int, num_classes: int, scale: float) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"a classifier needs at least 2 classes, not {num_classes}")
        if scale <= 0:
            raise ValueError(f"the scale s must be positive, not {scale}")
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        nn.init.normal_(self.weight, std=0.01)
        self.register_buffer("scale", torch.tensor(float(scale)))

    @property
    def num_classes(self) -> int:
        return self.weight.shape[0]

    def cosines(self, embeddings_BD: Tensor) -> Tensor:
        """Return cos_BC in float32, strictly inside (-1, 1)."""
        cos_BC = F.linear(F.normalize(embeddings_BD.float()), F.normalize(self.weight.float()))
        return cos_BC.clamp(-1 + COSINE_EPS, 1 - COSINE_EPS)

    def target_cosines(self, cos_B: Tensor) -> Tensor:
        """Return what stands in the target's place: (B,) to (B,). A plain cosine head changes nothing."""
        return cos_B

    def logits(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        cos_BC = self.cosines(embeddings_BD)
        index_B1 = labels_B[:, None]
        target_B1 = self.target_cosines(cos_BC.gather(1, index_B1))
        return self.scale * cos_BC.scatter(1, index_B1, target_B1)

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return the scalar loss. ``embeddings_BD`` need not be normalised; ``labels_B`` are class indices."""
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            return F.cross_entropy(self.logits(embeddings_BD, labels_B), labels_B)

"""Stochastic depth: G. Huang et al., "Deep networks with stochastic depth", ECCV 2016."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Drops a residual branch (B, ...) for a ``share`` in [0, 1) of the images in training; scales up the others."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.share):
            return x
        kept_B = torch.rand(len(x), device=x.device) >= self.share
        return x * (kept_B / (1 - self.share)).to(x.dtype).view(-1, *(1,) * (x.ndim - 1))


def drop_shares(blocks: int, largest: float) -> list[float]:
    """Return the share of each block: from 0 at the first to ``largest`` at the last."""
    return [largest * i / max(1, blocks - 1) for i in range(blocks)]

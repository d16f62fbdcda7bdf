"""Heads with a fixed scale and margin."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from training.losses.core import CosineHead

Beyond = Literal["linear", "easy", "continuous"]


class NormFace(CosineHead):
    """s * cos(theta): normalised softmax (F. Wang et al., "NormFace", 2017, eq. 9; CosFace's NSL, eq. 3)."""


class CosFace(CosineHead):
    """s * (cos(theta) - m): H. Wang et al., "CosFace", CVPR 2018, eq. 4; AM-softmax, F. Wang et al., 2018, eq. 6."""

    def __init__(self, embedding_dim: int, num_classes: int, scale: float = 64.0, margin: float = 0.35) -> None:
        super().__init__(embedding_dim, num_classes, scale)
        if not 0 <= margin < 2:
            raise ValueError(f"a cosine margin lies in [0, 2), not {margin}")
        self.margin = margin

    def target_cosines(self, cos_B: Tensor) -> Tensor:
        return cos_B - self.margin


class ArcFace(CosineHead):
    """s * cos(theta + m): J. Deng et al., "ArcFace", CVPR 2019, eq. 3.

    cos(theta + m) rises again beyond theta = pi - m, so there something else must stand in. ``beyond`` chooses it:

    - ``linear``: cos(theta) - m sin(m), the authors' own; jumps down at the boundary.
    - ``continuous``: cos(theta) - (1 - cos m), which equals cos(theta + m) at the boundary.
    - ``easy``: no margin at all where theta > pi/2.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        scale: float = 64.0,
        margin: float = 0.5,
        beyond: Beyond = "linear",
    ) -> None:
        super().__init__(embedding_dim, num_classes, scale)
        if not 0 <= margin < math.pi:
            raise ValueError(f"an angular margin lies in [0, pi) radians, not {margin}")
        if beyond not in get_args(Beyond):
            raise ValueError(f"beyond must be one of {get_args(Beyond)}, not {beyond!r}")
        self.margin_rad = margin
        self.beyond = beyond

    def target_cosines(self, cos_B: Tensor) -> Tensor:
        m = self.margin_rad
        with_margin = cos_B * math.cos(m) - torch.sqrt(1 - cos_B**2) * math.sin(m)
        match self.beyond:
            case "easy":
                return torch.where(cos_B > 0, with_margin, cos_B)
            case "linear":
                fallback = cos_B - m * math.sin(m)
            case "continuous":
                # cos(pi - m) - (1 - cos m) = -1 = cos((pi - m) + m)
                fallback = cos_B - (1 - math.cos(m))
        return torch.where(cos_B > math.cos(math.pi - m), with_margin, fallback)

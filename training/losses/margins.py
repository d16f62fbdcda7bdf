"""Heads with a fixed scale and margin, which transform only the target cosine."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from training.bounds import fixed_scale
from training.errors import require
from training.losses.core import CosineHead, require_option

Beyond = Literal["linear", "easy", "continuous"]
CombinedBeyond = Literal["continuous", "plain"]


class NormFace(CosineHead):
    """Normalized softmax, s * cos(theta): F. Wang et al., "NormFace", 2017; CosFace's NSL, eq. 3; CoCo.
    ``learn_scale``: train s from its initial value ``scale``, without weight decay (NormFace, section 3.2)."""

    def __init__(self, embedding_dim: int, num_classes: int, scale: float = 64.0, learn_scale: bool = False) -> None:
        super().__init__(embedding_dim, num_classes, scale)
        if learn_scale:
            self.shardable = False  # each rank would see the gradient of its classes only
            del self.scale
            self.scale = nn.Parameter(torch.tensor(float(scale)))


class CosFace(CosineHead):
    """CosFace, s * (cos(theta) - m): H. Wang et al., "CosFace", CVPR 2018, eq. 4; AM-softmax, F. Wang et al., 2018."""

    def __init__(self, embedding_dim: int, num_classes: int, scale: float = 64.0, margin: float = 0.35) -> None:
        super().__init__(embedding_dim, num_classes, scale)
        require(0 <= margin < 2, f"a cosine margin lies in [0, 2), not {margin}")
        self.margin = margin

    def target_cosines(self, theta_B: Tensor, norms_B: Tensor) -> Tensor:
        return torch.cos(theta_B) - self.margin * self.margin_share


class AdaptiveCosFace(CosFace):
    """CosFace with s = ln(C - 1) / cos(angle), see `bounds.fixed_scale`. ``angle_deg``: angle at which the loss changes
    fastest. Samples beyond it dominate the gradient."""

    def __init__(self, embedding_dim: int, num_classes: int, margin: float = 0.35, angle_deg: float = 45.0) -> None:
        super().__init__(embedding_dim, num_classes, fixed_scale(num_classes, angle_deg), margin)


class ArcFace(CosineHead):
    """ArcFace, s * cos(theta + m): J. Deng et al., "ArcFace", CVPR 2019, eq. 3.

    cos(theta + m) rises again beyond theta = pi - m. ``beyond`` selects the replacement there:

    - ``linear``: cos(theta) - m sin(m), from the authors' code; has a jump at the boundary.
    - ``continuous``: cos(theta) - (1 - cos m), equal to cos(theta + m) at the boundary.
    - ``easy``: no margin where theta > pi/2.
    """

    def __init__(
        self, embedding_dim: int, num_classes: int, scale: float = 64.0, margin: float = 0.5, beyond: Beyond = "linear"
    ) -> None:
        super().__init__(embedding_dim, num_classes, scale)
        require(0 <= margin < math.pi, f"an angular margin lies in [0, pi) radians, not {margin}")
        require_option(beyond, Beyond, "beyond")
        self.margin_rad, self.beyond = margin, beyond

    def target_cosines(self, theta_B: Tensor, norms_B: Tensor) -> Tensor:
        return add_angle(theta_B, torch.full_like(theta_B, self.margin_rad * self.margin_share), self.beyond)


def add_angle(theta_B: Tensor, margin_rad_B: Tensor, beyond: Beyond = "linear") -> Tensor:
    """Return cos(theta + m), with a fallback beyond theta = pi - m (see `ArcFace`)."""
    m, cos_B = margin_rad_B, torch.cos(theta_B)
    with_margin = torch.cos(theta_B + m)
    match beyond:
        case "easy":
            return torch.where(theta_B < math.pi / 2, with_margin, cos_B)
        case "linear":
            fallback = cos_B - m * torch.sin(m)
        case "continuous":
            # cos(pi - m) - (1 - cos m) = -1 = cos((pi - m) + m)
            fallback = cos_B - (1 - torch.cos(m))
    return torch.where(theta_B < math.pi - m, with_margin, fallback)


class CombinedMargin(CosineHead):
    """Combined margin, s * (cos(m1 theta + m2) - m3): ArcFace, eq. 4. CM1 is (1, 0.3, 0.2), CM2 (0.9, 0.4, 0.15).

    The formula rises again where m1 theta + m2 > pi. ``beyond`` selects the values there: ``continuous`` continues
    downwards with the slope of cos(theta), ``plain`` keeps the formula.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        scale: float = 64.0,
        m1: float = 1.0,
        m2: float = 0.3,
        m3: float = 0.2,
        beyond: CombinedBeyond = "continuous",
    ) -> None:
        super().__init__(embedding_dim, num_classes, scale)
        valid = m1 > 0 and 0 <= m2 < math.pi and 0 <= m3 < 2
        require(valid, f"margins need m1 > 0, m2 in [0, pi) and m3 in [0, 2), not {m1}, {m2}, {m3}")
        require_option(beyond, CombinedBeyond, "beyond")
        self.m1, self.m2_rad, self.m3, self.beyond = m1, m2, m3, beyond

    def target_cosines(self, theta_B: Tensor, norms_B: Tensor) -> Tensor:
        share = self.margin_share
        m1, m2, m3 = 1 + (self.m1 - 1) * share, self.m2_rad * share, self.m3 * share
        angle_B = m1 * theta_B + m2
        target_B = torch.cos(angle_B)
        if self.beyond == "continuous":
            # At theta = (pi - m2) / m1 the formula is -1.
            boundary = math.cos(min(math.pi, (math.pi - m2) / m1))
            target_B = torch.where(angle_B < math.pi, target_B, torch.cos(theta_B) - boundary - 1)
        return target_B - m3


class SphereFace(CombinedMargin):
    """SphereFace, s * cos(m theta) with m = 1.35: real-valued margin of ArcFace, section 2.2."""

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        scale: float = 64.0,
        margin: float = 1.35,
        beyond: CombinedBeyond = "continuous",
    ) -> None:
        super().__init__(embedding_dim, num_classes, scale, margin, 0.0, 0.0, beyond)

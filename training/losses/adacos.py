"""AdaCos heads: X. Zhang et al., "AdaCos: Adaptively Scaling Cosine Logits", CVPR 2019, section 4."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training.bounds import fixed_scale
from training.losses.core import CosineHead
from training.losses.margins import NormFace


class FixedAdaCos(NormFace):
    """Fixed AdaCos, s * cos(theta) with s = sqrt(2) ln(C - 1): section "Automatically choosing a fixed scale
    parameter"."""

    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__(embedding_dim, num_classes, fixed_scale(num_classes))


class AdaCos(CosineHead):
    """Dynamic AdaCos, s * cos(theta) with a scale updated every batch: section "Dynamically adaptive scale parameter".

    s(0) = sqrt(2) ln(C - 1);  s(t) = ln B_avg / cos(min(pi/4, theta_med)). B_avg is the mean over the global batch of
    sum_{k != y} exp(s(t-1) cos theta_k). theta_med is the median target angle. No gradient passes through s.

    Args:
        scale_floor: lower bound of s. ln B_avg can reach 0 once every non-target cosine is negative.
    """

    shardable = False  # B_avg sums over all classes

    def __init__(self, embedding_dim: int, num_classes: int, scale_floor: float = 1.0) -> None:
        super().__init__(embedding_dim, num_classes, fixed_scale(num_classes))
        if not scale_floor > 0:
            raise ValueError(f"scale_floor must be positive, not {scale_floor}")
        self.scale_floor = scale_floor

    def update_statistics(self, cos_BC: Tensor, labels_B: Tensor, norms_B: Tensor) -> None:
        index_B1 = labels_B[:, None]
        others_BC = (self.scale * cos_BC).scatter(1, index_B1, -math.inf)
        # Computed by logsumexp: plain exp overflows float32 near s = 100.
        log_b_B = self._all_gather(torch.logsumexp(others_BC, 1))
        log_b_avg = torch.logsumexp(log_b_B, 0) - math.log(len(log_b_B))
        theta_med = self._all_gather(torch.arccos(cos_BC.gather(1, index_B1))).median()
        self.scale.copy_((log_b_avg / torch.cos(theta_med.clamp(max=math.pi / 4))).clamp(min=self.scale_floor))

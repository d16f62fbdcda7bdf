"""AdaCos: the scale that needs no tuning (X. Zhang et al., "AdaCos", CVPR 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training.losses.core import CosineHead


def fixed_scale(num_classes: int) -> float:
    """s = sqrt(2) ln(C - 1), AdaCos eq. 13. 13.10 at C = 10,575."""
    if num_classes < 3:
        raise ValueError(f"AdaCos needs at least 3 classes (ln(C - 1) > 0), not {num_classes}")
    return math.sqrt(2) * math.log(num_classes - 1)


class AdaCos(CosineHead):
    """s * cos(theta) whose s follows the batch: AdaCos eqs. 15 and 16.

    s(0) = sqrt(2) ln(C - 1);  s(t) = ln B_avg / cos(min(pi/4, theta_med)), where B_avg is the batch mean of
    sum_{k != y} exp(s(t-1) cos theta_k) and theta_med the batch median of the target angles. No gradient passes
    through s. With ``dynamic=False`` s stays at s(0).

    ``scale_floor`` bounds s from below: ln B_avg may reach 0 once every non-target cosine is negative.
    """

    def __init__(self, embedding_dim: int, num_classes: int, dynamic: bool = True, scale_floor: float = 1.0) -> None:
        super().__init__(embedding_dim, num_classes, fixed_scale(num_classes))
        self.dynamic = dynamic
        self.scale_floor = scale_floor

    def logits(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        cos_BC = self.cosines(embeddings_BD)
        if self.dynamic and self.training:
            self._update_scale(cos_BC.detach(), labels_B)
        return self.scale * cos_BC

    @torch.no_grad()
    def _update_scale(self, cos_BC: Tensor, labels_B: Tensor) -> None:
        index_B1 = labels_B[:, None]
        others_BC = (self.scale * cos_BC).scatter(1, index_B1, -math.inf)
        # The mean of sums of exponentials, by logsumexp: plain exp overflows float32 near s = 100.
        log_b_avg = torch.logsumexp(others_BC.flatten(), 0) - math.log(len(cos_BC))
        theta_med = torch.arccos(cos_BC.gather(1, index_B1)).median()
        self.scale.copy_((log_b_avg / torch.cos(theta_med.clamp(max=math.pi / 4))).clamp(min=self.scale_floor))

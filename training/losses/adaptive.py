"""Heads whose scale or margin depends on the number of classes, the sample or the training progress."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from training import distributed
from training.bounds import fixed_scale
from training.errors import require
from training.losses.core import CosineHead, clamp_cosines, half_angles, require_classes, require_option
from training.losses.margins import ArcFace, NormFace, add_angle

MarginKind = Literal["arc", "cos"]


class FixedAdaCos(NormFace):
    """Fixed AdaCos, s * cos(theta) with s = sqrt(2) ln(C - 1): X. Zhang et al., "AdaCos: Adaptively Scaling Cosine
    Logits", CVPR 2019, section 4, "Automatically choosing a fixed scale parameter"."""

    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__(embedding_dim, num_classes, fixed_scale(num_classes))


class AdaCos(CosineHead):
    """Dynamic AdaCos, s * cos(theta) with a scale updated every batch: X. Zhang et al., CVPR 2019, section 4,
    "Dynamically adaptive scale parameter".

    s(0) = sqrt(2) ln(C - 1);  s(t) = ln B_avg / cos(min(pi/4, theta_med)). B_avg is the mean over the global batch of
    sum_{k != y} exp(s(t-1) cos theta_k). theta_med is the median target angle, of an even
    batch the mean of the middle two. No gradient passes through s.
    ``scale_floor``: lower bound of s. ln B_avg can reach 0 once every non-target cosine is negative.
    """

    shardable = False  # B_avg sums over all classes

    def __init__(self, embedding_dim: int, num_classes: int, scale_floor: float = 1.0) -> None:
        super().__init__(embedding_dim, num_classes, fixed_scale(num_classes))
        require(scale_floor > 0, f"scale_floor must be positive, not {scale_floor}")
        self.scale_floor = scale_floor

    def update_statistics(self, cos_BC: Tensor, labels_B: Tensor, norms_B: Tensor) -> None:
        index_B1 = labels_B[:, None]
        others_BC = (self.scale * cos_BC).scatter(1, index_B1, -math.inf)
        # Computed by logsumexp: plain exp overflows float32 near s = 100.
        log_b_B = self._all_gather(torch.logsumexp(others_BC, 1))
        log_b_avg = torch.logsumexp(log_b_B, 0) - math.log(len(log_b_B))
        theta_B = self._all_gather(torch.arccos(clamp_cosines(cos_BC.gather(1, index_B1)))).flatten().sort().values
        theta_med = (theta_B[(len(theta_B) - 1) // 2] + theta_B[len(theta_B) // 2]) / 2
        self.scale.copy_((log_b_avg / torch.cos(theta_med.clamp(max=math.pi / 4))).clamp(min=self.scale_floor))


class SubCenterArcFace(ArcFace):
    """ArcFace with K centers per class, of which the nearest counts: J. Deng et al., "Sub-center ArcFace", ECCV 2020.
    Mislabeled samples collect at separate centers."""

    shardable = False  # the centers of a class must stay on one rank

    def __init__(
        self, embedding_dim: int, num_classes: int, scale: float = 64.0, margin: float = 0.5, centers: int = 3
    ) -> None:
        require(centers >= 1, f"a class needs at least one center, not {centers}")
        require_classes(num_classes)
        super().__init__(embedding_dim, num_classes * centers, scale, margin)
        self.centers = centers

    @property
    def num_classes(self) -> int:
        return len(self.weight) // self.centers

    def class_weights(self) -> Tensor | None:
        """Return (C, d) mean directions of the centers of each class."""
        return torch.nn.functional.normalize(self.weight).view(self.num_classes, self.centers, -1).mean(1)

    def target_weights(self, embeddings_BD: Tensor, index_B: Tensor) -> Tensor:
        centers_BKD = self.weight.view(self.num_classes, self.centers, -1)[index_B]
        nearest_B = half_angles(embeddings_BD[:, None], centers_BKD).argmin(1)
        return centers_BKD.take_along_dim(nearest_B[:, None, None], 1)[:, 0]

    def cosines(self, embeddings_BD: Tensor) -> Tensor:
        return super().cosines(embeddings_BD).view(len(embeddings_BD), self.num_classes, self.centers).amax(2)

    @torch.no_grad()
    def target_angle_deg(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return the mean angle to the nearest center."""
        centers_BKD = self.weight.view(self.num_classes, self.centers, -1)[labels_B]
        return torch.rad2deg(half_angles(embeddings_BD[:, None], centers_BKD).amin(1)).mean()


class CurricularFace(ArcFace):
    """Curriculum from easy samples to hard negatives: Y. Huang et al., "CurricularFace", CVPR 2020, section 3.

    A negative class closer than the target with its margin gets cos (t + cos) instead of cos. t is the moving average
    of the mean target cosine over the global batch, momentum 0.99.
    """

    t: Tensor
    shardable = False  # hard negatives are compared with the target, which may be on another rank

    def __init__(
        self, embedding_dim: int, num_classes: int, scale: float = 64.0, margin: float = 0.5, momentum: float = 0.99
    ) -> None:
        super().__init__(embedding_dim, num_classes, scale, margin)
        require(0 <= momentum < 1, f"a momentum lies in [0, 1), not {momentum}")
        self.momentum = momentum
        self.register_buffer("t", torch.tensor(0.0))

    def log_values(self) -> dict[str, Tensor]:
        return {**super().log_values(), "t": self.t}

    def update_statistics(self, cos_BC: Tensor, labels_B: Tensor, norms_B: Tensor) -> None:
        mean = self._all_gather(cos_BC.gather(1, labels_B[:, None])).mean()
        self.t.lerp_(mean.to(self.t.dtype), 1 - self.momentum)

    def non_target_cosines(self, cos_BC: Tensor, labels_B: Tensor) -> Tensor:
        target_B1 = clamp_cosines(cos_BC.gather(1, labels_B[:, None]))
        m = self.margin_rad * self.margin_share
        threshold_B1 = target_B1 * math.cos(m) - torch.sqrt(1 - target_B1**2) * math.sin(m)
        return torch.where(cos_BC > threshold_B1, cos_BC * (self.t + cos_BC), cos_BC)


class MagFace(CosineHead):
    """Margin that grows with embedding length, a proxy of quality: Q. Meng et al., "MagFace", CVPR 2021, section 3.

    With a = ||x|| bounded to [l_a, u_a], the margin is m(a) = l_m + (u_m - l_m)(a - l_a)/(u_a - l_a). The regularizer
    lambda_g (1/a + a/u_a^2) increases a for good samples. Embeddings must not be normalized.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        scale: float = 64.0,
        l_a: float = 10.0,
        u_a: float = 110.0,
        l_m: float = 0.45,
        u_m: float = 0.8,
        lambda_g: float = 35.0,
    ) -> None:
        super().__init__(embedding_dim, num_classes, scale)
        valid = 0 < l_a < u_a and 0 <= l_m <= u_m < math.pi and lambda_g >= 0
        require(valid, "MagFace needs 0 < l_a < u_a, 0 <= l_m <= u_m < pi and lambda_g >= 0")
        self.l_a, self.u_a, self.l_m, self.u_m, self.lambda_g = l_a, u_a, l_m, u_m, lambda_g

    def target_cosines(self, theta_B: Tensor, norms_B: Tensor) -> Tensor:
        a_B = norms_B.clamp(self.l_a, self.u_a)
        m_B = self.l_m + (self.u_m - self.l_m) * (a_B - self.l_a) / (self.u_a - self.l_a)
        return add_angle(theta_B, m_B * self.margin_share)

    def regularizer(self, norms_B: Tensor) -> Tensor | float:
        a_B = norms_B.clamp(self.l_a, self.u_a)
        return self.lambda_g * (1 / a_B + a_B / self.u_a**2).mean()


class AdaFace(CosineHead):
    """Margin that adapts to embedding length: M. Kim et al., "AdaFace", CVPR 2022, section 3.

    q = clip(h (||x|| - mu) / sigma, -1, 1). mu and sigma are moving averages over the global batch with weight
    ``alpha``. The target is cos(theta - m q) - (m q + m), its angle kept inside [0, pi]. No gradient passes through q.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        scale: float = 64.0,
        margin: float = 0.4,
        h: float = 0.333,
        alpha: float = 0.01,
    ) -> None:
        super().__init__(embedding_dim, num_classes, scale)
        valid = 0 <= margin < math.pi / 2 and h > 0 and 0 < alpha <= 1
        require(valid, "AdaFace needs a margin in [0, pi/2), h > 0 and alpha in (0, 1]")
        self.margin, self.h, self.alpha = margin, h, alpha
        self.register_buffer("mean", torch.tensor(20.0))
        self.register_buffer("std", torch.tensor(100.0))

    def log_values(self) -> dict[str, Tensor]:
        return {**super().log_values(), "norm_mean": self.mean, "norm_std": self.std}

    def update_statistics(self, cos_BC: Tensor, labels_B: Tensor, norms_B: Tensor) -> None:
        lengths = self._all_gather(norms_B).clamp(1e-3, 100)
        self.mean.lerp_(lengths.mean().to(self.mean.dtype), self.alpha)
        self.std.lerp_(lengths.std().to(self.std.dtype), self.alpha)

    def target_cosines(self, theta_B: Tensor, norms_B: Tensor) -> Tensor:
        lengths_B = norms_B.detach().clamp(1e-3, 100)
        q_B = (self.h * (lengths_B - self.mean) / (self.std + 1e-3)).clamp(-1, 1)
        m = self.margin * self.margin_share
        return torch.cos((theta_B - m * q_B).clamp(1e-3, math.pi - 1e-3)) - (m * q_B + m)


class ElasticFace(CosineHead):
    """Random margin N(m, sigma) per sample: F. Boutros et al., "ElasticFace", CVPRW 2022, section 3.

    Evaluation uses m. Beyond theta = pi - m, which the paper does not cover, ArcFace's linear fallback applies.

    Args:
        kind: margin in the angle ("arc", m = 0.5, sigma = 0.05) or in the cosine ("cos", 0.35, 0.05).
        plus: assign the larger margins of a batch to the samples farther from their center.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        scale: float = 64.0,
        margin: float = 0.5,
        sigma: float = 0.05,
        kind: MarginKind = "arc",
        plus: bool = False,
    ) -> None:
        super().__init__(embedding_dim, num_classes, scale)
        require_option(kind, MarginKind, "kind")
        require(0 <= margin < math.pi / 2 and sigma >= 0, "ElasticFace needs a margin in [0, pi/2) and sigma >= 0")
        self.margin, self.sigma, self.kind, self.plus = margin, sigma, kind, plus
        self.compares_samples = plus

    def target_cosines(self, theta_B: Tensor, norms_B: Tensor) -> Tensor:
        drawn_B = torch.randn_like(theta_B)
        if self.plus and self.gets_global_batch:
            # Every rank has its own random numbers, and sorts the same batch.
            drawn_B = distributed.broadcast_first(drawn_B)
        m_B = self.margin + (self.sigma if self.training else 0.0) * drawn_B
        if self.plus:
            nearest_first_B = theta_B.detach().argsort(stable=True)
            m_B = torch.empty_like(m_B).scatter(0, nearest_first_B, m_B.sort().values)
        m_B = m_B * self.margin_share
        return add_angle(theta_B, m_B) if self.kind == "arc" else torch.cos(theta_B) - m_B

"""Loss terms added to a head, or used without one: over class centers, batches and feature lengths.

Each term maps (B, d) embeddings, (B,) labels and the head's (C, d) class weights (or None) to a scalar. Every rank
computes the loss of the global batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training import distributed
from training.errors import require
from training.losses.core import clamp_cosines, cosine_matrix, require_option, upcast

Mining = Literal["semi_hard", "all"]


class Term(nn.Module, ABC):
    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, embeddings_BD: Tensor, labels_B: Tensor, weights_CD: Tensor | None) -> Tensor: ...


class BatchTerm(Term):
    """Term over a batch."""

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor, weights_CD: Tensor | None) -> Tensor:
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            return self.loss(distributed.all_gather_own_grad(upcast(embeddings_BD)), distributed.all_gather(labels_B))

    @abstractmethod
    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor: ...


class ClassTerm(Term):
    """Term over a batch and the head's class weights."""

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor, weights_CD: Tensor | None) -> Tensor:
        if weights_CD is None:
            raise ValueError(f"{type(self).__name__} needs class weights, and this head has none")
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            x_BD, labels_B = distributed.all_gather_own_grad(upcast(embeddings_BD)), distributed.all_gather(labels_B)
            return self.class_loss(x_BD, labels_B, upcast(weights_CD))

    @abstractmethod
    def class_loss(self, x_BD: Tensor, labels_B: Tensor, weights_CD: Tensor) -> Tensor: ...


class Intra(ClassTerm):
    """Intra loss, (1/(pi N)) sum_i theta_y: ArcFace, eq. 5, without L2."""

    def class_loss(self, x_BD: Tensor, labels_B: Tensor, weights_CD: Tensor) -> Tensor:
        cos_B = F.cosine_similarity(x_BD, weights_CD[labels_B])
        return torch.arccos(clamp_cosines(cos_B)).mean() / math.pi


class Inter(ClassTerm):
    """Inter loss, -(1/(pi N (C-1))) sum_i sum_{j != y} arccos(W_y W_j): ArcFace, eq. 6, without L2."""

    def class_loss(self, x_BD: Tensor, labels_B: Tensor, weights_CD: Tensor) -> Tensor:
        angles_BC = torch.arccos(cosine_matrix(weights_CD[labels_B], weights_CD))
        others_BC = angles_BC.scatter(1, labels_B[:, None], 0.0)
        return -others_BC.sum() / (math.pi * len(x_BD) * (len(weights_CD) - 1))


class MinimumEnergy(ClassTerm):
    """Minimum hyperspherical energy, (1/(N (C-1))) sum_i sum_{j != y} f(||W_y - W_j||) with unit W.

    f(z) = z^-power, or -ln z for power 0. W. Liu et al., "Minimum hyperspherical energy", NeurIPS 2018, as SphereFace+
    applies it to the classifier.
    """

    def __init__(self, embedding_dim: int, num_classes: int, power: float = 2.0) -> None:
        super().__init__(embedding_dim, num_classes)
        require(power >= 0, f"the power must not be negative, but is {power}")
        self.power = power

    def class_loss(self, x_BD: Tensor, labels_B: Tensor, weights_CD: Tensor) -> Tensor:
        squares_BC = 2 - 2 * cosine_matrix(weights_CD[labels_B], weights_CD)
        energy_BC = -0.5 * squares_BC.log() if self.power == 0 else squares_BC ** (-self.power / 2)
        others_BC = energy_BC.scatter(1, labels_B[:, None], 0.0)
        return others_BC.sum() / (len(x_BD) * (len(weights_CD) - 1))


class ClassContrastive(ClassTerm):
    """C-contrastive loss, mean of ||x - W_y||^2 + sum_{j != y} max(0, m - ||x - W_j||^2), all unit vectors.

    F. Wang et al., "NormFace", 2017, section 3.3: class weights are agents of all samples of their class.
    """

    def __init__(self, embedding_dim: int, num_classes: int, margin: float = 1.0) -> None:
        super().__init__(embedding_dim, num_classes)
        require(0 < margin <= 4, f"a margin of squared distances lies in (0, 4], not {margin}")
        self.margin = margin

    def class_loss(self, x_BD: Tensor, labels_B: Tensor, weights_CD: Tensor) -> Tensor:
        squares_BC = 2 - 2 * cosine_matrix(x_BD, weights_CD)
        index_B1 = labels_B[:, None]
        return self.pair_losses(squares_BC.gather(1, index_B1), squares_BC).scatter(
            1, index_B1, self.own_losses(squares_BC.gather(1, index_B1))
        ).sum() / len(x_BD)

    def own_losses(self, own_B1: Tensor) -> Tensor:
        """Return (B, 1) losses from squared distances to the own agent."""
        return own_B1

    def pair_losses(self, own_B1: Tensor, other_BC: Tensor) -> Tensor:
        """Return (B, C) losses from squared distances to other agents."""
        return F.relu(self.margin - other_BC)


class ClassTriplet(ClassContrastive):
    """C-triplet loss, mean of sum_{j != y} max(0, m + ||x - W_y||^2 - ||x - W_j||^2): NormFace, section 3.3."""

    def __init__(self, embedding_dim: int, num_classes: int, margin: float = 0.8) -> None:
        super().__init__(embedding_dim, num_classes, margin)

    def own_losses(self, own_B1: Tensor) -> Tensor:
        return torch.zeros_like(own_B1)

    def pair_losses(self, own_B1: Tensor, other_BC: Tensor) -> Tensor:
        return F.relu(self.margin + own_B1 - other_BC)


class Triplet(BatchTerm):
    """Angular triplet loss, mean of max(0, theta_ap + m - theta_an) over all pairs (a, p).

    ArcFace, section 2.3; F. Schroff et al., "FaceNet", CVPR 2015. ``semi_hard`` selects for each pair the nearest
    negative farther than p, or else the farthest negative (FaceNet, section 3.2). ``all`` uses every negative.
    """

    def __init__(
        self, embedding_dim: int, num_classes: int, margin: float = 0.35, mining: Mining = "semi_hard"
    ) -> None:
        super().__init__(embedding_dim, num_classes)
        require(0 <= margin < math.pi, f"an angular margin lies in [0, pi) radians, not {margin}")
        require_option(mining, Mining, "mining")
        self.margin_rad, self.mining = margin, mining

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        theta_BB = torch.arccos(cosine_matrix(x_BD, x_BD))
        same_BB = labels_B[:, None] == labels_B
        anchors, positives = (same_BB & ~torch.eye(len(x_BD), dtype=torch.bool, device=x_BD.device)).nonzero().T
        negative_PB = ~same_BB[anchors]
        if not negative_PB.any():
            return x_BD.sum() * 0.0
        theta_ap_P1, theta_an_PB = theta_BB[anchors, positives][:, None], theta_BB[anchors]
        if self.mining == "semi_hard":
            farther_PB = negative_PB & (theta_an_PB > theta_ap_P1)
            nearest_P = theta_an_PB.masked_fill(~farther_PB, math.inf).argmin(1)
            farthest_P = theta_an_PB.masked_fill(~negative_PB, -math.inf).argmax(1)
            chosen_P1 = torch.where(farther_PB.any(1), nearest_P, farthest_P)[:, None]
            theta_an_PB, negative_PB = theta_an_PB.gather(1, chosen_P1), negative_PB.gather(1, chosen_P1)
        return F.relu(theta_ap_P1 + self.margin_rad - theta_an_PB)[negative_PB].mean()


class Center(BatchTerm):
    """Center loss, (1/2) mean ||x - c_y||^2: Y. Wen et al., ECCV 2016, section 3.2.

    The paper sums the softmax loss and this loss over the batch: its lambda is the weight here. Centers move by
    c_j -= alpha sum (c_j - x) / (1 + n_j), not by gradient. ``normalized`` puts both on the unit sphere.
    """

    centers: Tensor

    def __init__(self, embedding_dim: int, num_classes: int, alpha: float = 0.5, normalized: bool = False) -> None:
        super().__init__(embedding_dim, num_classes)
        require(0 < alpha <= 1, f"alpha lies in (0, 1], not {alpha}")
        self.alpha, self.normalized = alpha, normalized
        self.register_buffer("centers", torch.zeros(num_classes, embedding_dim))

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        if self.normalized:
            x_BD = F.normalize(x_BD)
        # The loss uses the centers before their update, as in the paper's algorithm.
        loss = 0.5 * (x_BD - self.centers[labels_B].to(x_BD.dtype)).square().sum(1).mean()
        if self.training:
            self._update_centers(x_BD, labels_B)
        return loss

    @torch.no_grad()
    def _update_centers(self, x_BD: Tensor, labels_B: Tensor) -> None:
        classes, inverse, counts = torch.unique(labels_B, return_inverse=True, return_counts=True)
        difference_BD = self.centers[labels_B] - x_BD.to(self.centers.dtype)
        sums = torch.zeros_like(self.centers[classes]).index_add(0, inverse, difference_BD)
        self.centers[classes] -= self.alpha * sums / (1 + counts)[:, None]


class Range(BatchTerm):
    """Range loss: X. Zhang et al., "Range loss", ICCV 2017, section 3.

    alpha * sum over people of the harmonic mean of their k largest ranges + beta * max(0, m - D). Ranges, and D between
    the two nearest class means, are squared distances within the batch.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        k: int = 2,
        margin: float = 1.0,
        alpha: float = 1.0,
        beta: float = 1.0,
        normalized: bool = False,
    ) -> None:
        super().__init__(embedding_dim, num_classes)
        valid = k >= 1 and min(margin, alpha, beta) >= 0
        require(valid, "range loss needs k >= 1 and non-negative margin, alpha and beta")
        self.k, self.margin, self.alpha, self.beta, self.normalized = k, margin, alpha, beta, normalized

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        if self.normalized:
            x_BD = F.normalize(x_BD)
        intra, means = x_BD.sum() * 0.0, []
        for label in torch.unique(labels_B):
            members = x_BD[labels_B == label]
            means.append(members.mean(0))
            squares = F.pdist(members).square()
            if len(squares):
                largest = squares.topk(min(self.k, len(squares))).values
                # Two equal photos have a range of 0, whose reciprocal is infinite.
                intra = intra + len(largest) / (1 / largest.clamp(min=1e-12)).sum()
        if len(means) < 2:
            return self.alpha * intra
        nearest = F.pdist(torch.stack(means)).square().min()
        return self.alpha * intra + self.beta * F.relu(self.margin - nearest)


class Contrastive(BatchTerm):
    """Contrastive loss, mean over pairs of (1/2) d^2 if same, (1/2) max(0, m - d)^2 if different.

    R. Hadsell et al., CVPR 2006, eq. 4; Y. Sun et al., "DeepID2", 2014, eq. 4. ``normalized`` measures d between unit
    vectors.
    """

    def __init__(self, embedding_dim: int, num_classes: int, margin: float = 1.0, normalized: bool = True) -> None:
        super().__init__(embedding_dim, num_classes)
        require(margin > 0, f"the margin must be positive, not {margin}")
        self.margin, self.normalized = margin, normalized

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        if self.normalized:
            x_BD = F.normalize(x_BD)
        first, second = torch.triu_indices(len(x_BD), len(x_BD), 1, device=x_BD.device)
        squares_P = (x_BD[first] - x_BD[second]).square().sum(1)
        # The gradient of the square root is infinite at 0.
        distances_P = (squares_P + 1e-12).sqrt()
        apart_P = F.relu(self.margin - distances_P).square()
        return 0.5 * torch.where(labels_B[first] == labels_B[second], squares_P, apart_P).mean()


class Ring(BatchTerm):
    """Ring loss, (1/2) mean (||x|| - R)^2 with learned R: Y. Zheng et al., "Ring loss", CVPR 2018, eq. 2."""

    def __init__(self, embedding_dim: int, num_classes: int, radius: float = 20.0) -> None:
        super().__init__(embedding_dim, num_classes)
        require(radius > 0, f"the radius must be positive, not {radius}")
        self.radius = nn.Parameter(torch.tensor(float(radius)))

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        off_B: Tensor = x_BD.norm(dim=1) - self.radius
        return 0.5 * off_B.square().mean()

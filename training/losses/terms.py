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
from training.losses.core import angle_matrix, cosine_matrix, half_angles, require_option, upcast

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
        return half_angles(x_BD, weights_CD[labels_B]).mean() / math.pi


class Inter(ClassTerm):
    """Inter loss, -(1/(pi N (C-1))) sum_i sum_{j != y} arccos(W_y W_j): ArcFace, eq. 6, without L2."""

    def class_loss(self, x_BD: Tensor, labels_B: Tensor, weights_CD: Tensor) -> Tensor:
        angles_BC = angle_matrix(weights_CD[labels_B], weights_CD)
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
        # Two equal weights have the energy of a distance near 0, and no gradient.
        squares_BC = 4 * (angle_matrix(weights_CD[labels_B], weights_CD) / 2).sin().square().clamp(min=5e-8)
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
        theta_BB = angle_matrix(x_BD, x_BD)
        same_BB = labels_B[:, None] == labels_B
        negatives_B1 = (~same_BB).sum(1, keepdim=True)
        # Negatives of each anchor by their angle, positives behind them. No indexing by masks, whose size a GPU would
        # have to report.
        ascending_BB = theta_BB.masked_fill(same_BB, 2 * math.pi).sort(1).values
        if self.mining == "semi_hard":
            farther_BB = torch.searchsorted(ascending_BB.detach(), theta_BB.detach(), right=True)
            chosen_BB = torch.minimum(farther_BB, negatives_B1 - 1).clamp(min=0)
            losses_BB = F.relu(theta_BB + self.margin_rad - ascending_BB.gather(1, chosen_BB))
            triplets_BB = (negatives_B1 > 0).expand_as(theta_BB)
        else:
            # The sum over the negatives nearer than the positive and the margin.
            limits_BB = theta_BB + self.margin_rad
            nearer_BB = torch.searchsorted(ascending_BB.detach(), limits_BB.detach())
            sums_BB = F.pad(ascending_BB.cumsum(1), (1, 0)).gather(1, nearer_BB)
            losses_BB = nearer_BB * limits_BB - sums_BB
            triplets_BB = negatives_B1.expand_as(theta_BB)
        pairs_BB = same_BB & ~torch.eye(len(x_BD), dtype=torch.bool, device=x_BD.device)
        total = torch.where(pairs_BB, losses_BB, 0.0).sum()
        return total / torch.where(pairs_BB, triplets_BB, 0).sum().clamp(min=1)


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
        counts_B = (labels_B[:, None] == labels_B).sum(1)
        moves_BD = (x_BD.to(self.centers.dtype) - self.centers[labels_B]) / (1 + counts_B)[:, None]
        self.centers.index_add_(0, labels_B, moves_BD, alpha=self.alpha)


def _squared_distances(x_BD: Tensor) -> Tensor:
    """Return (B, B) squared distances. float64 keeps those of near rows; the gradient of torch.pdist needs B^2 d."""
    x64_BD = x_BD.double()
    squares_B = x64_BD.square().sum(1)
    return (squares_B[:, None] + squares_B - 2 * x64_BD @ x64_BD.T).clamp(min=0).to(x_BD.dtype)


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
        return self.alpha * self._intra(x_BD, labels_B) + self.beta * self._inter(x_BD, labels_B)

    def _intra(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return the sum over people of the harmonic mean of their largest ranges."""
        # Pairs in order of people, and of falling range; no loop over people, whose number a GPU would have to report.
        # A person has the number of the first sample, and pairs of two people come last.
        count = len(x_BD)
        first_P, second_P = torch.triu_indices(count, count, 1, device=x_BD.device)
        squares_P = _squared_distances(x_BD)[first_P, second_P]
        person_B = (labels_B[:, None] == labels_B).int().argmax(1)
        person_P = torch.where(labels_B[first_P] == labels_B[second_P], person_B[first_P], count)
        order_P = squares_P.detach().argsort(descending=True)
        order_P = order_P[person_P[order_P].argsort(stable=True)]
        person_P = person_P[order_P]
        rank_P = torch.arange(len(person_P), device=x_BD.device) - torch.searchsorted(person_P, person_P)
        chosen_P = ((rank_P < self.k) & (person_P < count)).to(x_BD.dtype)
        # Two equal photos have a range of 0, whose reciprocal is infinite.
        reciprocals_P = chosen_P / squares_P[order_P].clamp(min=1e-12)
        zeros = x_BD.new_zeros(count + 1)
        counts, sums = (zeros.index_add(0, person_P, values_P) for values_P in (chosen_P, reciprocals_P))
        return (counts / torch.where(counts > 0, sums, 1.0)).sum()

    def _inter(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return max(0, m - D); 0 for a single person."""
        same_BB = labels_B[:, None] == labels_B
        means_BD = same_BB.to(x_BD.dtype) @ x_BD / same_BB.sum(1, keepdim=True)
        return F.relu(self.margin - _squared_distances(means_BD).masked_fill(same_BB, torch.inf).min())


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

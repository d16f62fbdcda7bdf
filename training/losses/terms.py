"""Losses that stand beside a head's, or in its place: over class centres, over a batch, over lengths.

Each is ``(embeddings_BD, labels_B, weights_CD) -> scalar``; ``weights_CD`` are the head's class weights (None where a
head has none). Every rank computes the loss of all ranks' batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training import distributed
from training.losses.core import bounded, cosine_matrix, wide

Mining = Literal["semi_hard", "all"]


class Term(nn.Module, ABC):
    def __init__(self, embedding_dim: int, num_classes: int) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, embeddings_BD: Tensor, labels_B: Tensor, weights_CD: Tensor | None) -> Tensor: ...


class BatchTerm(Term):
    """A loss over a batch."""

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor, weights_CD: Tensor | None) -> Tensor:
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            return self.loss(distributed.all_rows(wide(embeddings_BD)), distributed.gathered(labels_B))

    @abstractmethod
    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor: ...


class ClassTerm(Term):
    """A loss over a batch and the head's class weights."""

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor, weights_CD: Tensor | None) -> Tensor:
        if weights_CD is None:
            raise ValueError(f"{type(self).__name__} is about class weights, which this head does not have")
        with torch.autocast(embeddings_BD.device.type, enabled=False):
            x_BD, labels_B = distributed.all_rows(wide(embeddings_BD)), distributed.gathered(labels_B)
            return self.class_loss(x_BD, labels_B, wide(weights_CD))

    @abstractmethod
    def class_loss(self, x_BD: Tensor, labels_B: Tensor, weights_CD: Tensor) -> Tensor: ...


class Intra(ClassTerm):
    """(1/(pi N)) sum_i theta_y: ArcFace, eq. 5, without its L2."""

    def class_loss(self, x_BD: Tensor, labels_B: Tensor, weights_CD: Tensor) -> Tensor:
        cos_B = F.cosine_similarity(x_BD, weights_CD[labels_B])
        return torch.arccos(bounded(cos_B)).mean() / math.pi


class Inter(ClassTerm):
    """-(1/(pi N (C-1))) sum_i sum_{j != y} arccos(W_y W_j): ArcFace, eq. 6, without its L2."""

    def class_loss(self, x_BD: Tensor, labels_B: Tensor, weights_CD: Tensor) -> Tensor:
        angles_BC = torch.arccos(cosine_matrix(weights_CD[labels_B], weights_CD))
        others_BC = angles_BC.scatter(1, labels_B[:, None], 0.0)
        return -others_BC.sum() / (math.pi * len(x_BD) * (len(weights_CD) - 1))


class MinimumEnergy(ClassTerm):
    """(1/(N (C-1))) sum_i sum_{j != y} f(||W_y - W_j||), W of unit length, f(z) = z^-power, or -ln z at power 0.

    W. Liu et al., "Minimum hyperspherical energy", NeurIPS 2018, as its SphereFace+ has it for the classifier.
    """

    def __init__(self, embedding_dim: int, num_classes: int, power: float = 2.0) -> None:
        super().__init__(embedding_dim, num_classes)
        if power < 0:
            raise ValueError(f"the energy's power is not negative, as {power} is")
        self.power = power

    def class_loss(self, x_BD: Tensor, labels_B: Tensor, weights_CD: Tensor) -> Tensor:
        squares_BC = 2 - 2 * cosine_matrix(weights_CD[labels_B], weights_CD)
        energy_BC = -0.5 * squares_BC.log() if self.power == 0 else squares_BC ** (-self.power / 2)
        others_BC = energy_BC.scatter(1, labels_B[:, None], 0.0)
        return others_BC.sum() / (len(x_BD) * (len(weights_CD) - 1))


class Triplet(BatchTerm):
    """mean of max(0, theta_ap + m - theta_an) over all pairs (a, p): ArcFace, section 2.3; F. Schroff et al.,
    "FaceNet", CVPR 2015.

    ``semi_hard`` takes for each pair the nearest negative that is farther than p, or the farthest where none is
    (FaceNet, section 3.2); ``all`` takes every negative.
    """

    def __init__(
        self, embedding_dim: int, num_classes: int, margin: float = 0.35, mining: Mining = "semi_hard"
    ) -> None:
        super().__init__(embedding_dim, num_classes)
        if not 0 <= margin < math.pi:
            raise ValueError(f"an angular margin lies in [0, pi) radians, not {margin}")
        if mining not in get_args(Mining):
            raise ValueError(f"mining must be one of {get_args(Mining)}, not {mining!r}")
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
    """(1/2) mean ||x - c_y||^2: Y. Wen et al., "A discriminative feature learning approach", ECCV 2016, section 3.2,
    which sums over the batch: its lambda times the batch size is a weight here.

    Centres follow their samples, c_j -= alpha sum (c_j - x) / (1 + n_j), not by gradient. With ``normalised`` both live
    on the unit sphere, as cosines are what is served.
    """

    centers: Tensor

    def __init__(self, embedding_dim: int, num_classes: int, alpha: float = 0.5, normalised: bool = False) -> None:
        super().__init__(embedding_dim, num_classes)
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha lies in (0, 1], not {alpha}")
        self.alpha, self.normalised = alpha, normalised
        self.register_buffer("centers", torch.zeros(num_classes, embedding_dim))

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        if self.normalised:
            x_BD = F.normalize(x_BD)
        # Its value enters the loss before the centres move, as in the paper's algorithm.
        loss = 0.5 * (x_BD - self.centers[labels_B].to(x_BD.dtype)).square().sum(1).mean()
        if self.training:
            self._follow(x_BD, labels_B)
        return loss

    @torch.no_grad()
    def _follow(self, x_BD: Tensor, labels_B: Tensor) -> None:
        classes, inverse, counts = torch.unique(labels_B, return_inverse=True, return_counts=True)
        difference_BD = self.centers[labels_B] - x_BD.to(self.centers.dtype)
        sums = torch.zeros_like(self.centers[classes]).index_add(0, inverse, difference_BD)
        self.centers[classes] -= self.alpha * sums / (1 + counts)[:, None]


class Range(BatchTerm):
    """alpha * sum over people of the harmonic mean of their k largest ranges + beta * max(0, m - D): X. Zhang et al.,
    "Range loss", ICCV 2017, section 3. Ranges and D, the nearest two class means, are squared distances in the
    batch."""

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        k: int = 2,
        margin: float = 1.0,
        alpha: float = 1.0,
        beta: float = 1.0,
        normalised: bool = False,
    ) -> None:
        super().__init__(embedding_dim, num_classes)
        if k < 1 or min(margin, alpha, beta) < 0:
            raise ValueError("range loss needs k >= 1 and margin, alpha, beta that are not negative")
        self.k, self.margin, self.alpha, self.beta, self.normalised = k, margin, alpha, beta, normalised

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        if self.normalised:
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
    """mean over pairs of (1/2) d^2 if same, (1/2) max(0, m - d)^2 if not: R. Hadsell et al., CVPR 2006, eq. 4; Y. Sun
    et al., "DeepID2", 2014, eq. 4. With ``normalised`` d is between unit vectors."""

    def __init__(self, embedding_dim: int, num_classes: int, margin: float = 1.0, normalised: bool = True) -> None:
        super().__init__(embedding_dim, num_classes)
        if not margin > 0:
            raise ValueError(f"the margin must be positive, not {margin}")
        self.margin, self.normalised = margin, normalised

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        if self.normalised:
            x_BD = F.normalize(x_BD)
        first, second = torch.triu_indices(len(x_BD), len(x_BD), 1, device=x_BD.device)
        squares_P = (x_BD[first] - x_BD[second]).square().sum(1)
        # The root's gradient is infinite at 0.
        distances_P = (squares_P + 1e-12).sqrt()
        apart_P = F.relu(self.margin - distances_P).square()
        return 0.5 * torch.where(labels_B[first] == labels_B[second], squares_P, apart_P).mean()


class Ring(BatchTerm):
    """(1/2) mean (||x|| - R)^2 with R learned: Y. Zheng et al., "Ring loss", CVPR 2018, eq. 2."""

    def __init__(self, embedding_dim: int, num_classes: int, radius: float = 20.0) -> None:
        super().__init__(embedding_dim, num_classes)
        if not radius > 0:
            raise ValueError(f"the radius must be positive, not {radius}")
        self.radius = nn.Parameter(torch.tensor(float(radius)))

    def loss(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        off_B: Tensor = x_BD.norm(dim=1) - self.radius
        return 0.5 * off_B.square().mean()

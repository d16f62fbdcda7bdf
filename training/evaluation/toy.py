"""A toy of eight people whose embeddings have two dimensions: what softmax, its bias and a margin do to them.

NormFace (F. Wang et al., 2017), figures 2 and 3, draws such embeddings of MNIST; ArcFace (J. Deng et al., CVPR 2019),
figure 3, those of eight people. Here the people are random patterns of 16x16 pixels, so that the toy needs no data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config import HeadConfig, Option
from training.evaluation.metrics import Floats, Ints
from training.losses import build_head
from training.losses.softmax import Softmax

PEOPLE: Final = 8
IMAGES: Final = 150
"""Images per person."""
SIDE_PX, PATTERN_PX = 16, 4
MAX_BLEND, NOISE = 0.5, 0.6
"""Largest share of another person in an image, and standard deviation of its noise."""
STEPS, BATCH, RATE = 400, 128, 3e-3
COVERED: Final = 0.95
"""Share of a person's embeddings that an arc covers."""


@dataclass(frozen=True, eq=False)
class Toy:
    """Embeddings ``x_N2`` with ``labels_N``, class weights ``weights_C2``, and ``biases_C``, 0 without a bias."""

    x_N2: Floats
    labels_N: Ints
    weights_C2: Floats
    biases_C: Floats

    def probability(self, person: int, points_P2: Floats) -> Floats:
        """Return the (P,) softmax probability of a person at points of the plane: NormFace, eq. 1."""
        logits_PC = points_P2 @ self.weights_C2.T + self.biases_C
        shifted = np.exp(logits_PC - logits_PC.max(1, keepdims=True))
        return np.asarray(shifted[:, person] / shifted.sum(1))

    def accuracy(self, normalized: bool) -> float:
        """Return the share of embeddings nearest to the mean of their own person, as they are or on the unit circle."""
        x_N2 = self.x_N2 / np.linalg.norm(self.x_N2, axis=1, keepdims=True) if normalized else self.x_N2
        means_C2 = np.stack([x_N2[self.labels_N == c].mean(0) for c in range(len(self.weights_C2))])
        nearest = np.linalg.norm(x_N2[:, None] - means_C2, axis=2).argmin(1)
        return float((nearest == self.labels_N).mean())


def draw_images(seed: int) -> tuple[Tensor, Tensor]:
    """Draw (N, 256) images and (N,) labels: a pattern per person, blended with another's, and noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(PEOPLE, 1, PATTERN_PX, PATTERN_PX, generator=generator)
    people = F.interpolate(patterns, size=(SIDE_PX, SIDE_PX), mode="bilinear").flatten(1)
    labels = torch.arange(PEOPLE).repeat_interleave(IMAGES)
    others = (labels + torch.randint(1, PEOPLE, labels.shape, generator=generator)) % PEOPLE
    share = MAX_BLEND * torch.rand(len(labels), 1, generator=generator)
    noise = NOISE * torch.randn(len(labels), SIDE_PX**2, generator=generator)
    return (1 - share) * people[labels] + share * people[others] + noise, labels


def train_toy(head: str, options: Mapping[str, Option] | None = None, seed: int = 0) -> Toy:
    """Train a small network with a head of ``training.losses.HEADS`` in seconds. Equal seeds give equal results."""
    images, labels = draw_images(seed)
    with torch.random.fork_rng(), _one_thread():
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(SIDE_PX**2, 128), nn.PReLU(), nn.Linear(128, 64), nn.PReLU(), nn.Linear(64, 2)
        )
        loss = build_head(HeadConfig(head, options or {}), 2, PEOPLE)
        optimizer = torch.optim.AdamW([*network.parameters(), *loss.parameters()], RATE, weight_decay=5e-4)
        for step in range(STEPS):
            rows = torch.randint(len(images), (BATCH,))
            optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))
            optimizer.zero_grad()
            loss(network(images[rows]), labels[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            x_N2 = network(images)
    weights_C2 = loss.class_weights()
    if weights_C2 is None:
        raise ValueError(f"the head {head} has no class weights to draw")
    has_bias = isinstance(loss, Softmax) and loss.has_bias
    biases_C = loss.classifier.bias if isinstance(loss, Softmax) and has_bias else torch.zeros(PEOPLE)
    numbers = (values.detach().double().numpy() for values in (x_N2, weights_C2, biases_C))
    x, weights, biases = numbers
    return Toy(x, labels.numpy(), weights, biases)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: the layers are so small that two threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def misleading_triple(toy: Toy) -> tuple[int, int, int]:
    """Return rows f1, f2, f3: f2 and f3 are of one person, and f1, of another, is much nearer to f2 than f3 is.

    NormFace, figure 2, left: the distance of embeddings that are not normalized misleads. Maximizes |f2 - f3| -
    |f1 - f2|.
    """
    distances_NN = np.linalg.norm(toy.x_N2[:, None] - toy.x_N2, axis=2)
    same_NN = toy.labels_N[:, None] == toy.labels_N
    nearest_other = np.where(same_NN, np.inf, distances_NN)
    farthest_own = np.where(same_NN, distances_NN, -np.inf)
    second = int((farthest_own.max(1) - nearest_other.min(1)).argmax())
    return int(nearest_other[second].argmin()), second, int(farthest_own[second].argmax())


def shortest_person(toy: Toy) -> tuple[int, float]:
    """Return the person whose mean embedding is nearest to zero, and its length relative to the median person's."""
    lengths = np.array([np.linalg.norm(toy.x_N2[toy.labels_N == c].mean(0)) for c in range(PEOPLE)])
    return int(lengths.argmin()), float(lengths.min() / np.median(lengths))


def arcs_rad(toy: Toy) -> Floats:
    """Return (C, 2) the first and last angle of the arc around each person's mean direction that covers COVERED of the
    person's embeddings."""
    directions_N = np.arctan2(toy.x_N2[:, 1], toy.x_N2[:, 0])
    arcs = []
    for person in range(PEOPLE):
        own = directions_N[toy.labels_N == person]
        middle = np.arctan2(np.sin(own).mean(), np.cos(own).mean())
        turned = np.angle(np.exp(1j * (own - middle)))
        arcs.append(middle + np.quantile(turned, [(1 - COVERED) / 2, (1 + COVERED) / 2]))
    return np.array(arcs)


def gaps_deg(arcs: Floats) -> Floats:
    """Return (C,) the angles between neighboring arcs around the circle; negative where two arcs overlap."""
    middles = np.mod(arcs.mean(1), 2 * math.pi)
    widths = arcs[:, 1] - arcs[:, 0]
    order = middles.argsort()
    steps = np.diff(np.append(middles[order], middles[order[0]] + 2 * math.pi))
    return np.asarray(np.degrees(steps - (widths[order] + np.roll(widths[order], -1)) / 2))

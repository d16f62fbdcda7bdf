"""The papers' losses written out again: plain Python, one sample and one class at a time, float64.

Nothing here knows torch or the heads. ``x`` (B, d) embeddings, ``w`` (C, d) class weights, ``y`` (B,) labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Labels = NDArray[np.int64]
Derivation = Callable[[Matrix, Matrix, Labels], float]
Target = Callable[[float, float], float]
"""(angle, length of x) to what stands in the target's place, before the scale."""


def length(v: Matrix) -> float:
    return math.sqrt(sum(float(a) ** 2 for a in v))


def cosine(a: Matrix, b: Matrix) -> float:
    return sum(float(p) * float(q) for p, q in zip(a, b, strict=True)) / (length(a) * length(b))


def angle(a: Matrix, b: Matrix) -> float:
    return math.acos(max(-1.0, min(1.0, cosine(a, b))))


def cross_entropy(logits: Sequence[float], target: int) -> float:
    top = max(logits)
    return math.log(sum(math.exp(v - top) for v in logits)) + top - logits[target]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def softmax_over(x: Matrix, y: Labels, logit: Callable[[int, int], float], classes: int) -> float:
    """``logit`` (i, j) is the logit of class j for sample i."""
    return mean([cross_entropy([logit(i, j) for j in range(classes)], int(y[i])) for i in range(len(x))])


def cosine_head(s: float, target: Target) -> Derivation:
    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        def logit(i: int, j: int) -> float:
            return s * (target(angle(x[i], w[j]), length(x[i])) if j == y[i] else cosine(x[i], w[j]))

        return softmax_over(x, y, logit, len(w))

    return loss


def arc(m: float, beyond: str = "linear") -> Target:
    def target(theta: float, _: float) -> float:
        if beyond == "easy":
            return math.cos(theta + m) if theta < math.pi / 2 else math.cos(theta)
        if theta < math.pi - m:
            return math.cos(theta + m)
        return math.cos(theta) - (m * math.sin(m) if beyond == "linear" else 1 - math.cos(m))

    return target


def combined(m1: float, m2: float, m3: float, beyond: str = "continuous") -> Target:
    def target(theta: float, _: float) -> float:
        if beyond == "plain" or m1 * theta + m2 < math.pi:
            return math.cos(m1 * theta + m2) - m3
        edge = min(math.pi, (math.pi - m2) / m1)
        return math.cos(theta) - math.cos(edge) - 1 - m3

    return target


def psi(theta: float, m: int) -> float:
    k = min(m - 1, math.floor(theta * m / math.pi))
    return (1 - 2 * (k % 2)) * math.cos(m * theta) - 2 * k


def multiplicative(m: int, annealing_lambda: float, unit_weights: bool) -> Derivation:
    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        def logit(i: int, j: int) -> float:
            theta = angle(x[i], w[j])
            size = length(x[i]) * (1 if unit_weights else length(w[j]))
            eased = (annealing_lambda * math.cos(theta) + psi(theta, m)) / (1 + annealing_lambda)
            return size * (eased if j == y[i] else math.cos(theta))

        return softmax_over(x, y, logit, len(w))

    return loss


def curricular(s: float, m: float, t: float) -> Derivation:
    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        def logit(i: int, j: int) -> float:
            theta = angle(x[i], w[y[i]])
            if j == y[i]:
                return s * arc(m)(theta, 0)
            c = cosine(x[i], w[j])
            return s * (c * (t + c) if c > math.cos(theta + m) else c)

        return softmax_over(x, y, logit, len(w))

    return loss


def magface(s: float, l_a: float, u_a: float, l_m: float, u_m: float, lambda_g: float) -> Derivation:
    def bounded(a: float) -> float:
        return min(max(a, l_a), u_a)

    def target(theta: float, a: float) -> float:
        return arc(l_m + (u_m - l_m) * (bounded(a) - l_a) / (u_a - l_a))(theta, a)

    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        g = mean([1 / bounded(length(v)) + bounded(length(v)) / u_a**2 for v in x])
        return cosine_head(s, target)(x, w, y) + lambda_g * g

    return loss


def subcenter(s: float, m: float, centers: int) -> Derivation:
    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        def nearest(i: int, j: int) -> float:
            return max(cosine(x[i], v) for v in w[j * centers : (j + 1) * centers])

        def logit(i: int, j: int) -> float:
            return s * (arc(m)(math.acos(nearest(i, j)), 0) if j == y[i] else nearest(i, j))

        return softmax_over(x, y, logit, len(w) // centers)

    return loss


def intra(x: Matrix, w: Matrix, y: Labels) -> float:
    return mean([angle(v, w[k]) for v, k in zip(x, y, strict=True)]) / math.pi


def inter(x: Matrix, w: Matrix, y: Labels) -> float:
    total = sum(angle(w[k], w[j]) for k in y for j in range(len(w)) if j != k)
    return -total / (math.pi * len(x) * (len(w) - 1))


def energy(power: float) -> Derivation:
    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        units = [v / length(v) for v in w]
        total = 0.0
        for k in y:
            for j in range(len(w)):
                if j != k:
                    z = length(units[k] - units[j])
                    total += -math.log(z) if power == 0 else z**-power
        return total / (len(x) * (len(w) - 1))

    return loss


def triplet(m: float, mining: str) -> Derivation:
    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        terms = []
        for a in range(len(x)):
            for p in range(len(x)):
                if p == a or y[p] != y[a]:
                    continue
                near = angle(x[a], x[p])
                negatives = [angle(x[a], x[n]) for n in range(len(x)) if y[n] != y[a]]
                farther = [v for v in negatives if v > near]
                chosen = negatives if mining == "all" else [min(farther)] if farther else [max(negatives)]
                terms += [max(0.0, near + m - v) for v in chosen]
        return mean(terms)

    return loss


def contrastive(m: float, normalized: bool) -> Derivation:
    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        v = [r / length(r) for r in x] if normalized else list(x)
        terms = []
        for i in range(len(v)):
            for j in range(i):
                d = length(v[i] - v[j])
                terms.append(0.5 * d**2 if y[i] == y[j] else 0.5 * max(0.0, m - d) ** 2)
        return mean(terms)

    return loss


def ranges(k: int, m: float, alpha: float, beta: float) -> Derivation:
    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        intra_part, means = 0.0, []
        for label in sorted(set(y.tolist())):
            members = [x[i] for i in range(len(x)) if y[i] == label]
            means.append(sum(members[1:], members[0]) / len(members))
            squares = sorted(
                (length(members[i] - members[j]) ** 2 for i in range(len(members)) for j in range(i)), reverse=True
            )[:k]
            if squares:
                intra_part += len(squares) / sum(1 / d for d in squares)
        nearest = min(length(means[i] - means[j]) ** 2 for i in range(len(means)) for j in range(i))
        return alpha * intra_part + beta * max(0.0, m - nearest)

    return loss


def adaface(s: float, m: float, q: Sequence[float]) -> Derivation:
    """Return the AdaFace loss for given q of every sample: no gradient passes through q."""

    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        def logit(i: int, j: int) -> float:
            theta = angle(x[i], w[j])
            if j != y[i]:
                return s * math.cos(theta)
            return s * (math.cos(min(max(theta - m * q[i], 1e-3), math.pi - 1e-3)) - (m * q[i] + m))

        return softmax_over(x, y, logit, len(w))

    return loss


def batch_centroids(s: float) -> Derivation:
    """Return the loss over the people of the batch, each at the mean of its samples. ``w`` is unused."""

    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        people = sorted(set(y.tolist()))
        centroids = [np.mean([x[i] for i in range(len(x)) if y[i] == k], axis=0) for k in people]
        places = np.array([people.index(int(k)) for k in y])
        return softmax_over(x, places, lambda i, j: s * cosine(x[i], centroids[j]), len(people))

    return loss


def agents(m: float, triplet: bool) -> Derivation:
    def loss(x: Matrix, w: Matrix, y: Labels) -> float:
        def distance(i: int, j: int) -> float:
            return length(x[i] / length(x[i]) - w[j] / length(w[j])) ** 2

        terms = []
        for i in range(len(x)):
            own = distance(i, int(y[i]))
            others = [distance(i, j) for j in range(len(w)) if j != y[i]]
            hinges = [max(0.0, m + own - d) if triplet else max(0.0, m - d) for d in others]
            terms.append(sum(hinges) + (0.0 if triplet else own))
        return mean(terms)

    return loss


def slope(loss: Callable[[Matrix], float], at: Matrix, step: float = 1e-6) -> Matrix:
    """Central differences."""
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (loss(up) - loss(down)) / (2 * step)
    return gradient

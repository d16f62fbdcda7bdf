"""False match rate of one gallery, as a normal tail on the scale of its pack.

The scale is z(t), the normal quantile of 1 - FMR(t) of the pack, which has millions of pairs. On it, scores of
different people are nearly normal for any gallery, with a place near 0 and a width near 1. People unlike the pack's
move both: those of All-Age-Faces to 0.9 and 1.3.

Observed are the largest scores of searches without a mate. Their distribution is what a search's threshold must keep.
Pairs say less: they depend on each other, and most of them lie far below any threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from models.risk.calibration import (
    EDGES,
    MIN_RATE,
    MIN_SUPPORT,
    SMALLEST_TAIL,
    Floats,
    FmrCurve,
    count_at_or_above,
    survival,
)

USUAL_STD: Final = (0.2, 0.03)
"""Prior standard deviations of place and log width, of people like the pack's."""
OTHER_STD: Final = (0.7, 0.3)
"""The same of people unlike the pack's. Without them, 12 people of All-Age-Faces let in 15 times 1 %."""
OTHER_SHARE: Final = 0.3
"""Prior probability of people unlike the pack's. At 0.1, galleries of 25 such people let in 1.2 times as much."""
CENSORED: Final = 0.5
"""Share of scores that count as one class. Fitted to all, 20 instead of 23 of 30 cells of CFP keep their risk."""
TAIL_BOUNDS: Final = (math.log(0.6), math.log(2.5))
"""Bounds of the log width, for vectors that are not faces and hardly differ."""
MUTUAL: Final = 2.0
"""Factor of variances: two people who resemble each other are each the best of the other's search."""
NEWTON_STEPS: Final = 30


@dataclass(frozen=True, eq=False)
class TailFit:
    """Fitted curve, and the share of its place and width that the scores, not the prior, determine."""

    curve: FmrCurve
    own_share: float


def fit_on_scale(
    z: Floats, scores: Floats, comparisons: int, weight: float = 1.0, usual: tuple[float, float] = (0.0, 0.0)
) -> TailFit:
    """Fit place and width of a normal tail, by their largest posterior density, and return its FMR curve.

    Args:
        z: (2001,) scale at EDGES.
        scores: (2000,) weighted numbers of searches by their largest score.
        comparisons: number of scores of which each is the largest.
        weight: number of independent searches that each search counts as.
        usual: usual place and log width.
    """
    above = count_at_or_above(scores)
    row = max(0, int(np.searchsorted(-above, -CENSORED * above[0], "right")) - 1)
    filled = row + np.flatnonzero(scores[row:])
    below, tail = weight * float(scores[:row].sum()), weight * scores[filled]
    edges = np.concatenate([z[filled], z[filled + 1], z[row : row + 1]])

    def loss(place: float, log_width: float) -> float:
        rates = np.minimum(survival((edges - place) / math.exp(log_width)), 1 - SMALLEST_TAIL)
        logs = comparisons * np.log1p(-rates)  # of the shares of searches below the edges
        low, high = logs[: len(filled)], logs[len(filled) : -1]
        between = high + np.log(np.maximum(-np.expm1(low - high), MIN_RATE))
        return -float(tail @ between) - below * float(logs[-1]) - _log_prior(place - usual[0], log_width - usual[1])[0]

    (place, log_width), covariance = _minimize(loss, usual)
    covariance = MUTUAL * covariance
    x = (z - place) / math.exp(log_width)
    rates = np.maximum(survival(x), MIN_RATE)
    hazard = np.where(rates > MIN_RATE, np.exp(-0.5 * np.minimum(x**2, 1400)) / math.sqrt(2 * math.pi) / rates, x)
    gradient = np.stack([hazard / math.exp(log_width), hazard * x])
    variances = np.maximum(np.einsum("in,ij,jn->n", gradient, covariance, gradient), 0.0)
    supported = np.flatnonzero(above >= MIN_SUPPORT)
    last = float(EDGES[supported[-1]]) if len(supported) else -1.0
    _, precision = _log_prior(place - usual[0], log_width - usual[1])
    own_share = 1 - float(np.clip(np.diag(covariance) * precision, 0, 1).mean())
    return TailFit(FmrCurve(rates, variances, last), own_share)


def _log_prior(place: float, log_width: float) -> tuple[float, Floats]:
    """Return the log prior density, from the usual place and width, and the (2,) prior precisions there."""
    at, parts = np.array([place, log_width]), []
    for share, std in ((1 - OTHER_SHARE, USUAL_STD), (OTHER_SHARE, OTHER_STD)):
        parts.append(math.log(share / (std[0] * std[1])) - float(((at / std) ** 2).sum()) / 2)
    total = float(np.logaddexp(parts[0], parts[1]))
    usual, other = (math.exp(part - total) for part in parts)
    return total, usual / np.square(USUAL_STD) + other / np.square(OTHER_STD)


def _minimize(loss: Callable[[float, float], float], start: tuple[float, float]) -> tuple[tuple[float, float], Floats]:
    """Minimize over place and log width by damped Newton steps; return the minimum and the inverse Hessian."""
    h, at, value = 1e-3, np.array(start), loss(*start)
    hessian = np.eye(2)
    for _ in range(NEWTON_STEPS):
        ahead, behind = ([loss(*(at + sign * h * step)) for step in np.eye(2)] for sign in (1, -1))
        crossed = loss(*(at + h)) + loss(*(at - h))
        gradient = (np.array(ahead) - behind) / (2 * h)
        diagonal = (np.array(ahead) + behind - 2 * value) / h**2
        across = (crossed - sum(ahead) - sum(behind) + 2 * value) / (2 * h**2)
        hessian = np.array([[diagonal[0], across], [across, diagonal[1]]])
        curvatures, axes = np.linalg.eigh(hessian)
        hessian = axes * np.maximum(np.abs(curvatures), 1e-3) @ axes.T  # a step of Newton must descend
        step = np.linalg.solve(hessian, -gradient)
        step /= max(1.0, 2 * float(np.abs(step).max()))
        for _ in range(20):
            new = at + step
            new[1] = min(max(new[1], TAIL_BOUNDS[0]), TAIL_BOUNDS[1])
            if (found := loss(*new)) <= value:
                break
            step = step / 2
        else:
            break
        moved, at, value = float(np.abs(new - at).max()), new, found
        if moved < 1e-5:
            break
    return (float(at[0]), float(at[1])), np.asarray(np.linalg.inv(hessian), np.float64)

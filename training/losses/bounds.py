"""What the papers prove about scale and margin. C is the number of classes, d the dimension of the embedding."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq


def _classes(num_classes: int, least: int) -> None:
    if num_classes < least:
        raise ValueError(f"this bound needs at least {least} classes, not {num_classes}")


def _probability(probability: float) -> None:
    if not 0 < probability < 1:
        raise ValueError(f"a probability lies in (0, 1), not {probability}")


def normface_loss_bound(num_classes: int, length: float) -> float:
    """The least softmax loss that features and weights of one ``length`` l can reach: log(1 + (C-1) e^(-C/(C-1) l^2)).

    NormFace, proposition 2. With the scale of the cosine heads, l^2 = s.
    """
    _classes(num_classes, 2)
    return math.log1p((num_classes - 1) * math.exp(-num_classes / (num_classes - 1) * length**2))


def cosface_scale_bound(num_classes: int, probability: float) -> float:
    """The least s at which class centres reach ``probability``: (C-1)/C ln((C-1)P/(1-P)). CosFace, section 3.3."""
    _classes(num_classes, 2)
    _probability(probability)
    c = num_classes
    return (c - 1) / c * math.log((c - 1) * probability / (1 - probability))


def cosface_margin_bound(num_classes: int, embedding_dim: int) -> float:
    """The largest m that can be fulfilled. CosFace, section 3.4.

    1 - cos(2 pi / C) for d = 2; C/(C-1) for C <= d + 1. For more classes the paper only says that m must stay far
    below C/(C-1), which is returned.
    """
    _classes(num_classes, 2)
    if embedding_dim == 2:
        return 1 - math.cos(2 * math.pi / num_classes)
    return num_classes / (num_classes - 1)


def l2_softmax_alpha_bound(num_classes: int, probability: float) -> float:
    """The least length alpha at which features reach ``probability``: ln(p(C-2)/(1-p)). R. Ranjan et al., 2017,
    "Bounds on parameter alpha"."""
    _classes(num_classes, 3)
    _probability(probability)
    return math.log(probability * (num_classes - 2) / (1 - probability))


def fixed_scale(num_classes: int) -> float:
    """s = sqrt(2) ln(C-1): AdaCos's fixed scale; the seed of adaptive-scale CosFace. 13.10 at C = 10,575.

    It is where P = 1/2 at theta = pi/4, with the other classes at right angles.
    """
    _classes(num_classes, 3)
    return math.sqrt(2) * math.log(num_classes - 1)


def inflection_scale(num_classes: int) -> float:
    """The s at which P(theta) has its inflection exactly at pi/4; AdaCos approximates it. 12.79 at C = 10,575.

    P = 1/(1 + e^-v), v = s cos(theta) - ln(C-1). d2P/dtheta2 = 0 means (1-2P) s sin^2(theta) = cos(theta), at pi/4
    s (1-2P) = sqrt(2).

    Raises:
        ValueError: too few classes: no s puts the inflection there.
    """
    # The condition also holds once near s = sqrt(2), where P is flat. The root that is meant lies beyond the maximum.
    candidates = np.linspace(math.sqrt(2), fixed_scale(num_classes), 1000)
    top = max(candidates, key=lambda s: _signed_slope(s, num_classes))
    if _signed_slope(top, num_classes) <= math.sqrt(2):
        raise ValueError(f"{num_classes} classes are too few for an inflection at pi/4")
    return float(brentq(lambda s: _signed_slope(s, num_classes) - math.sqrt(2), top, candidates[-1]))


def steepest_scale(num_classes: int) -> float:
    """The s that makes P's slope at pi/4 as large as any s can. 13.40 at C = 10,575.

    The slope there is P(1-P) s sin(theta); its derivative by s vanishes where 1 + s cos(theta) (1-2P) = 0, that is
    s (1-2P) = -sqrt(2).
    """
    low = fixed_scale(num_classes)
    return float(brentq(lambda s: _signed_slope(s, num_classes) + math.sqrt(2), low, low + 10))


def _signed_slope(s: float, num_classes: int) -> float:
    """s (1 - 2P) at theta = pi/4."""
    return -s * math.tanh((s / math.sqrt(2) - math.log(num_classes - 1)) / 2)

"""Bounds of scale and margin proved in the papers. C is the number of classes, d the embedding dimension."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq


def _require_three(num_classes: int) -> None:
    if num_classes < 3:
        raise ValueError(f"this bound needs at least 3 classes, not {num_classes}")


def normface_loss_bound(num_classes: int, length: float) -> float:
    """Return the minimum softmax loss with features and weights of ``length`` l: log(1 + (C-1) e^(-C/(C-1) l^2)).
    NormFace, proposition 2. For the scale of a cosine head, l^2 = s."""
    return math.log1p((num_classes - 1) * math.exp(-num_classes / (num_classes - 1) * length**2))


def cosface_scale_bound(num_classes: int, probability: float) -> float:
    """Return the minimum s for class centers to reach ``probability``: (C-1)/C ln((C-1)P/(1-P)). CosFace, section
    3.3."""
    c = num_classes
    return (c - 1) / c * math.log((c - 1) * probability / (1 - probability))


def cosface_margin_bound(num_classes: int, embedding_dim: int) -> float:
    """Return the largest feasible margin m. CosFace, section 3.4.

    1 - cos(2 pi / C) for d = 2; C/(C-1) for C <= d + 1. For more classes the paper only states that m must stay far
    below C/(C-1), which is returned.
    """
    if embedding_dim == 2:
        return 1 - math.cos(2 * math.pi / num_classes)
    return num_classes / (num_classes - 1)


def l2_softmax_alpha_bound(num_classes: int, probability: float) -> float:
    """Return the minimum feature length alpha to reach ``probability``: ln(p(C-2)/(1-p)). R. Ranjan et al., 2017,
    "Bounds on parameter alpha"."""
    _require_three(num_classes)
    return math.log(probability * (num_classes - 2) / (1 - probability))


def fixed_scale(num_classes: int, angle_deg: float = 45.0) -> float:
    """Return s = ln(C-1) / cos(angle), at which P = 1/2 at this angle if the other classes are at right angles. At 45
    degrees, sqrt(2) ln(C-1): the fixed scale of AdaCos and of adaptive-scale CosFace, 13.10 at C = 10,575."""
    _require_three(num_classes)
    if not 0 <= angle_deg < 90:
        raise ValueError(f"the angle lies in [0, 90) degrees, not {angle_deg}")
    return math.log(num_classes - 1) / math.cos(math.radians(angle_deg))


def inflection_scale(num_classes: int) -> float:
    """Return the s at which P(theta) has its inflection point at pi/4, approximated by AdaCos. 12.79 at C = 10,575.

    P = 1/(1 + e^-v), v = s cos(theta) - ln(C-1). d2P/dtheta2 = 0 means (1-2P) s sin^2(theta) = cos(theta); at pi/4, s
    (1-2P) = sqrt(2). Raises ValueError for too few classes for an inflection at pi/4.
    """
    # The condition has a second root near s = sqrt(2), where P is flat. Search beyond the maximum.
    candidates = np.linspace(math.sqrt(2), fixed_scale(num_classes), 1000)
    top = max(candidates, key=lambda s: _signed_slope(s, num_classes))
    if _signed_slope(top, num_classes) <= math.sqrt(2):
        raise ValueError(f"{num_classes} classes are too few for an inflection at pi/4")
    return float(brentq(lambda s: _signed_slope(s, num_classes) - math.sqrt(2), top, candidates[-1]))


def steepest_scale(num_classes: int) -> float:
    """Return the s that maximizes the slope of P at pi/4. 13.40 at C = 10,575. The slope is P(1-P) s sin(theta). Its
    derivative by s is zero where 1 + s cos(theta) (1-2P) = 0, that is s (1-2P) = -sqrt(2)."""
    low = fixed_scale(num_classes)
    return float(brentq(lambda s: _signed_slope(s, num_classes) + math.sqrt(2), low, low + 10))


def _signed_slope(s: float, num_classes: int) -> float:
    """Return s (1 - 2P) at theta = pi/4."""
    return -s * math.tanh((s / math.sqrt(2) - math.log(num_classes - 1)) / 2)

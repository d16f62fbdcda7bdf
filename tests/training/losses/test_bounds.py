"""Bounds of scale and margin agree with numerical optima."""

from __future__ import annotations

import math
from functools import partial

import mpmath
import numpy as np
import pytest

from training import bounds

CASIA = 10_575


def test_normfaces_bound_is_reached_by_a_simplex() -> None:
    """Features lie on their weights, C unit vectors of a regular simplex."""
    for classes, length in ((3, 1.0), (10, 2.0), (50, 4.5)):
        simplex = np.eye(classes) - 1 / classes
        simplex /= np.linalg.norm(simplex, axis=1, keepdims=True)
        logits = length**2 * simplex @ simplex.T
        loss = float(np.log(np.exp(logits[0]).sum()) - logits[0, 0])
        assert bounds.normface_loss_bound(classes, length) == pytest.approx(loss)


def test_cosfaces_scale_reaches_the_wanted_probability() -> None:
    for classes, probability in ((10, 0.9), (1000, 0.99), (CASIA, 0.9)):
        s = bounds.cosface_scale_bound(classes, probability)
        # At the optimum the target's cosine is 1 and the others' -1/(C-1).
        p = 1 / (1 + (classes - 1) * math.exp(-s * classes / (classes - 1)))
        assert p == pytest.approx(probability)
        assert bounds.normface_loss_bound(classes, math.sqrt(s)) == pytest.approx(-math.log(probability))


def test_cosfaces_margin() -> None:
    assert bounds.cosface_margin_bound(4, 2) == pytest.approx(1.0)
    assert bounds.cosface_margin_bound(8, 2) == pytest.approx(1 - math.cos(math.pi / 4))
    assert bounds.cosface_margin_bound(3, 512) == pytest.approx(1.5)
    # A simplex's margin: cos 0 minus the cosine between two of its corners.
    simplex = np.eye(5) - 0.2
    simplex /= np.linalg.norm(simplex, axis=1, keepdims=True)
    assert bounds.cosface_margin_bound(5, 512) == pytest.approx(1 - simplex[0] @ simplex[1])


def test_l2_softmax_length_reaches_the_wanted_probability() -> None:
    for classes, probability in ((10, 0.9), (CASIA, 0.9)):
        alpha = bounds.l2_softmax_alpha_bound(classes, probability)
        # Their eq. 8: one center at -x, the other C - 2 at right angles.
        p = math.exp(alpha) / (math.exp(alpha) + classes - 2)
        assert p == pytest.approx(probability, rel=1e-9)


def slope(theta: mpmath.mpf, s: mpmath.mpf, classes: int) -> mpmath.mpf:
    return mpmath.diff(lambda t: 1 / (1 + (classes - 1) * mpmath.exp(-s * mpmath.cos(t))), theta)


@pytest.mark.parametrize("classes", [50, 1000, CASIA, 1_000_000])
def test_scales_at_a_quarter_of_pi(classes: int) -> None:
    quarter = mpmath.pi / 4
    approximate, inflection, steepest = (
        f(classes) for f in (bounds.fixed_scale, bounds.inflection_scale, bounds.steepest_scale)
    )
    with mpmath.workdps(40):
        half = 1 / (1 + (classes - 1) * mpmath.exp(-mpmath.mpf(approximate) * mpmath.cos(quarter)))
        assert float(half) == pytest.approx(0.5)
        second = mpmath.diff(lambda t: slope(t, mpmath.mpf(inflection), classes), quarter)
        assert abs(float(second)) < 1e-7
        by_scale = mpmath.diff(lambda s: slope(quarter, s, classes), mpmath.mpf(steepest))
        assert abs(float(by_scale)) < 1e-9
    assert inflection < approximate < steepest


def test_impossible_bounds_are_rejected() -> None:
    alpha = partial(bounds.l2_softmax_alpha_bound, probability=0.9)
    for bound, classes in ((bounds.inflection_scale, 10), (bounds.fixed_scale, 2), (alpha, 2)):
        with pytest.raises(ValueError, match="classes"):
            bound(classes)

"""Impostor and genuine scores of photos without names, as a mixture.

Faces of one photo are different people. Faces of different photos are different people but for a share of repeated
people. The scores of different people are nearly normal on a Box-Cox scale of 1 - cosine
(:mod:`models.risk.normal_scale`); scores of one person lie around the middle between the median stranger and 1. The two
are fitted in turn: the normal line to the quantiles that repeated people hardly change, and the repeated people to the
scores that this line does not explain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from models.risk.calibration import (
    EDGES,
    MIN_RATE,
    MIN_SUPPORT,
    NORMAL,
    Floats,
    Ints,
    count_at_or_above,
    fit_tail,
    survival,
)
from models.risk.normal_scale import fit_line, unknown_power

LEVELS: Final = (0.5, 0.35, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
FIRST_LEVELS: Final = 5
"""Number of levels before the share of repeated people is known."""
MIN_LEVEL_OVER_SHARE: Final = 1.0
"""Smallest level in units of the share of repeated people, which are removed before but not exactly."""
MIN_LEVEL_PAIRS: Final = 50
MIXTURE_LEVEL: Final = 0.02
"""Share of different people above which the mixture is fitted."""
STEPS: Final = 12
GENUINE_PAIRS: Final = 1000
COARSE_STEP: Final = 10
PROBIT_STD: Final = 0.04
PROBIT_STD_FACES: Final = 700
"""Standard deviation of the modeled normal quantile: PROBIT_STD for many faces, 1.4 times it for PROBIT_STD_FACES."""
EM_STEPS: Final = 60
MEANS: Final = np.linspace(0.35, 0.85, 26)
DEVIATIONS: Final = np.linspace(0.06, 0.26, 11)
MEAN_PRIOR: Final = (0.58, 0.08)
"""Mean and deviation of a person's mean score, from 0 at the median stranger to 1. Three recognizers: 0.52 to 0.64."""
DEVIATION_PRIOR: Final = (0.14, 0.03)


@dataclass(frozen=True, eq=False)
class UnlabeledScores:
    """Separated scores.

    Attributes:
        rates: (2001,) FMR at EDGES.
        impostor: (2000,) estimated numbers of pairs of different people.
        genuine: (2000,) modeled numbers of pairs of one person, at least GENUINE_PAIRS in total.
        repeated_share: estimated share of pairs that show one person.
    """

    rates: Floats
    impostor: Ints
    genuine: Ints
    repeated_share: float


def separate(counts: Ints, faces: int) -> UnlabeledScores:
    """Separate the scores of different people from those of repeated people.

    Args:
        counts: (2000,) numbers of pairs of faces by score.
        faces: number of faces behind the pairs.

    Raises:
        ValueError: there are too few pairs.
    """
    total = float(counts.sum())
    if total * LEVELS[FIRST_LEVELS - 1] < MIN_LEVEL_PAIRS:
        raise ValueError(f"{total:,.0f} pairs of faces are too few")
    shares = count_at_or_above(counts) / total
    usual = unknown_power(shares)
    repeated, above = 0.0, np.zeros(len(EDGES))
    rates = shares
    for step in range(STEPS):
        impostors = np.minimum.accumulate(np.clip((shares - repeated * above) / (1 - repeated), MIN_RATE, 1.0))
        least = max(MIN_LEVEL_PAIRS / total, MIN_LEVEL_OVER_SHARE * repeated if step else LEVELS[FIRST_LEVELS - 1])
        levels = [level for level in LEVELS if level >= least]
        rates = fit_line(impostors, levels if len(levels) > 2 else LEVELS[:3], faces, usual)
        repeated, above = _fit_repeated(counts, rates, faces)
    density = (1 - repeated) * -np.diff(rates)
    same = repeated * -np.diff(above)
    removed = np.rint(counts * same / np.maximum(density + same, MIN_RATE)).astype(np.int64)
    genuine = np.rint(-np.diff(above) * max(GENUINE_PAIRS, repeated * total)).astype(np.int64)
    return UnlabeledScores(rates, counts - removed, genuine, repeated)


def _fit_repeated(counts: Ints, rates: Floats, faces: int) -> tuple[float, Floats]:
    """Return the share of pairs that show one person, and the (2001,) shares of their scores at or above EDGES.

    Maximum a posteriori over a grid of normal distributions, cut at 1, with the share by expectation maximization.
    """
    total = float(counts.sum())
    median = float(np.interp(-0.5, -rates, EDGES))
    row = int(np.searchsorted(-rates, -MIXTURE_LEVEL))
    place = (EDGES - median) / (1 - median)
    mean, deviation = (grid.reshape(-1, 1) for grid in np.meshgrid(MEANS, DEVIATIONS, indexing="ij"))
    below = 1 - survival(((place[None] - mean) / deviation).ravel()).reshape(len(mean), -1)
    below /= below[:, -1:]
    same, different = np.diff(below, axis=1)[:, row:], -np.diff(rates)[row:]
    tail = counts[row:].astype(np.float64)
    share = np.full((len(mean), 1), max(1.0, 0.3 * float(tail.sum())) / total)
    for _ in range(EM_STEPS):
        explained = share * same
        share = ((explained / np.maximum((1 - share) * different + explained, MIN_RATE)) @ tail)[:, None] / total
    expected = np.maximum(total * ((1 - share) * different + share * same), 1e-12)
    # Pairs that share a face depend on each other: each face counts as one observation.
    posterior = faces / total * (np.log(expected) @ tail - expected.sum(1))
    for values, (center, spread) in ((mean, MEAN_PRIOR), (deviation, DEVIATION_PRIOR)):
        posterior -= ((values[:, 0] - center) / spread) ** 2 / 2
    best = int(posterior.argmax())
    return float(share[best, 0]), np.asarray(1 - below[best])


def calibration_document(scores: UnlabeledScores, faces: int) -> dict[str, Any]:
    """Return a document for :class:`models.risk.calibration.Calibration`, with FMR and FNMR as modeled.

    Above the median, the histograms hold the modeled numbers of pairs: counts at high scores still contain repeated
    people. The interval follows the uncertainty of the normal line.
    """
    total = float(scores.impostor.sum())
    median = int(np.searchsorted(-scores.rates, -0.5))
    modeled = np.rint(-np.diff(scores.rates) * total).astype(np.int64)
    impostor = np.concatenate([scores.impostor[:median], modeled[median:]])
    start = int(np.flatnonzero(scores.rates * total >= MIN_SUPPORT)[-1])
    weights = -np.diff(scores.rates)[start:] * total
    tail = fit_tail(EDGES[start + 1 :] - EDGES[start], weights, float(EDGES[start]), float(scores.rates[start]))
    z = np.array([-NORMAL.inv_cdf(min(0.5, max(rate, 1e-15))) for rate in scores.rates[::COARSE_STEP]])
    deviations = PROBIT_STD * math.sqrt(1 + PROBIT_STD_FACES / faces) * (z + 1)
    return {
        "version": 1,
        "label_free": True,
        "faces": faces,
        "impostor_pairs": int(impostor.sum()),
        "repeated_share": scores.repeated_share,
        "histograms": {"impostor": impostor.tolist(), "genuine": scores.genuine.tolist()},
        "tail": vars(tail),
        "variances": [EDGES[::COARSE_STEP].tolist(), (deviations**2).tolist()],
    }

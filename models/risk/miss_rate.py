"""Share of enrolled people that a gallery misses at a threshold, from its own templates and the pack's mated pairs."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from models.risk.calibration import CONFIDENCE_Z, EDGES, Calibration, Estimate, Ints, count_at_or_above, mean_growth
from models.risk.impostor_evidence import ImpostorEvidence

PACK_PEOPLE: Final = 20
"""Weight of the pack's mated pairs, in people of the gallery."""
SITTING_QUANTILE: Final = 0.9
"""Quantile of the pack's mated similarities above which two photos look like one sitting's."""
MIN_SITTING_PEOPLE: Final = 10


def promised_misses(evidence: ImpostorEvidence | None, pack: Calibration | None, threshold: float) -> Estimate | None:
    """Return the FNIR at rank 1 and a rival-adjusted threshold, for photos like those enrolled; None without mated
    pairs.

    A person is missed if the own subject scores below the threshold or not highest, or if the runner-up reaches the
    threshold too. Each person of the gallery with two templates or more counts as one observation, the pack's mated
    pairs as PACK_PEOPLE. The interval is E. Wilson's (1927).
    """
    own = None if evidence is None else evidence.genuine
    people = 0 if own is None else own.people
    missed = 0.0
    if own is not None and people:
        missed = people - _reaching(own.scores, threshold) + _reaching(own.runners_up, threshold)
    if pack is not None:
        templates = 1.0 if evidence is None else evidence.mean_templates
        growth = float(mean_growth(templates, pack.mean_genuine))
        missed += PACK_PEOPLE * pack.fnmr(min(1.0, threshold / growth))
        people += PACK_PEOPLE
    return wilson(missed, people) if people else None


def is_one_sitting(evidence: ImpostorEvidence, pack: Calibration | None) -> bool:
    """Return whether the photos of most subjects are as alike as photos of one sitting."""
    own = evidence.genuine
    if own is None or pack is None or own.people < MIN_SITTING_PEOPLE:
        return False
    return _reaching(own.single, pack.threshold_at_fnmr(SITTING_QUANTILE)) > own.people / 2


def _reaching(counts: Ints, threshold: float) -> float:
    return float(np.interp(threshold, EDGES, count_at_or_above(counts)))


def wilson(missed: float, people: float) -> Estimate:
    """Return a share of ``people`` with its 95 % interval (E. Wilson, 1927)."""
    p, z2 = missed / people, CONFIDENCE_Z**2 / people
    middle = (p + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * p * (1 - p) + z2**2 / 4) / (1 + z2)
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))

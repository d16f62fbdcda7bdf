"""Linked lookalikes, such as twins: which of them a face is. Pure functions.

A search tells a person from strangers. Lookalikes are no strangers to each other: photos of the one resemble the other.
Let g be the density of one person's similarities, and h that of a person's similarities to a lookalike: normal, with
the means m and m', and the variance v. If the face is one of two linked people, and has the similarities s1 and s2 to
them, the log odds of the first over the second are

    log (g(s1) h(s2)) / (h(s1) g(s2)) = (m - m') (s1 - s2) / v.

m and v are the pack's. m' is the mean similarity of the two people's templates plus a standard error: where it seems
small by chance, the odds would be too large. The similarities of a face to two people are taken as independent. They
rise and fall together with its quality, which makes the odds too small, not too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kith.wire.common import Fusion
from models.risk.calibration import BIN_WIDTH, EDGES, Calibration
from models.runtime.network import Float
from service.domain.fusion import fuse_similarities
from service.domain.gallery import Keys, Snapshot
from service.domain.outcomes import RiskTarget
from service.risk.search import Identification, Lookalike

LOOKALIKES: Final = "lookalikes"
"""Reason: linked people are too near to each other to name one."""
MIN_RELATEDNESS: Final = 0.5
"""Smallest share of the way from strangers to one person at which m' lies: few templates may seem less alike."""
FALLBACK_RISK: Final = 0.01
"""Accepted share of mistaken lookalikes where the risk is not a rate of searches."""


@dataclass(frozen=True)
class Linked:
    """Lookalike of the best subject: its key and its fused similarity to the face.

    ``to_best``: mean similarity to the best subject over all pairs of templates. ``templates``: of the one of both that
    has fewer.
    """

    subject_pk: int
    similarity: float
    to_best: float
    templates: int = 1


def linked_with(
    answer: Identification, probe: Float, stored: Snapshot, fusion: Fusion, among: Keys | None
) -> list[Linked]:
    """Return the lookalikes of the best subject that have templates.

    Args:
        probe: (d,) unit vector of the face.
        stored: templates of the best subject and its lookalikes.
        among: ascending keys of the subjects that were searched; None: all.
    """
    best = answer.decision.best
    keys = np.unique(stored.subject_pks)
    if best is None or best.subject_pk not in keys:
        return []
    (fused,) = fuse_similarities(probe[None], stored.vectors, stored.subject_pks, stored.qualities, fusion)
    own = stored.vectors[stored.subject_pks == best.subject_pk]
    linked = []
    for key, similarity in zip(keys.tolist(), fused.tolist(), strict=True):
        if key != best.subject_pk and (among is None or key in among):
            theirs = stored.vectors[stored.subject_pks == key]
            to_best, fewest = float((own @ theirs.T).mean()), min(len(own), len(theirs))
            linked.append(Linked(key, min(1.0, similarity), to_best, fewest))
    return linked


def tell_apart(answer: Identification, linked: Sequence[Linked], target: RiskTarget) -> Identification:
    """Return the answer, uncertain unless the best subject leads its lookalikes, with the people it may be.

    The best subject leads if it is the person with a probability of at least 1 - ``target``. Without a calibration, it
    leads if no lookalike reaches the review threshold. No outcome gets better: an answer that is uncertain for another
    reason stays so, and lists the people if the best subject does not lead.
    """
    best, model = answer.decision.best, answer.model
    if best is None or answer.decision.outcome == "unknown" or not linked:
        return answer
    if model is None or model.pack is None:
        near = [one.subject_pk for one in linked if one.similarity >= answer.shown_thresholds.review]
        return _one_of(answer, [Lookalike(key, None) for key in (best.subject_pk, *near)]) if near else answer
    odds = log_odds(best.similarity, linked, model.pack)
    shares = np.exp(np.array([0.0, *(-each for each in odds)]) - max(0.0, *(-each for each in odds)))
    shares /= shares.sum()
    risk = target.value if target.kind == "fpir" else FALLBACK_RISK
    if 1 - shares[0] <= risk:
        return answer
    keys = [best.subject_pk, *(one.subject_pk for one in linked)]
    people = [Lookalike(key, share) for key, share in zip(keys, shares.tolist(), strict=True)]
    return _one_of(answer, sorted(people, key=lambda one: -(one.probability or 0.0)))


def log_odds(similarity: float, linked: Sequence[Linked], pack: Calibration) -> list[float]:
    """Return the natural log odds of the best subject, with this similarity, over each lookalike."""
    centers = EDGES[:-1] + BIN_WIDTH / 2
    mean = float(np.average(centers, weights=pack.genuine))
    variance = float(np.average((centers - mean) ** 2, weights=pack.genuine))
    strangers = pack.curve.threshold_at_fmr(0.5).score
    least = strangers + MIN_RELATEDNESS * (mean - strangers)
    odds = []
    for one in linked:
        alike = max(least, one.to_best + math.sqrt(variance / one.templates))
        odds.append(max(0.0, mean - alike) * (similarity - one.similarity) / variance)
    return odds


def _one_of(answer: Identification, people: Sequence[Lookalike]) -> Identification:
    decision = replace(answer.decision, outcome="uncertain")
    return replace(answer, decision=decision, reasons=(*answer.reasons, LOOKALIKES), lookalikes=people)

"""Verification (1:1): the similarity of two sides, and the calibration that applies. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kith.wire.common import Fusion
from models.runtime.network import Float
from service.domain.fusion import fuse_similarities
from service.domain.outcomes import REVIEW_FACTOR
from service.risk.decision import ImpostorRisk


@dataclass(frozen=True, eq=False)
class EnrolledSubject:
    """Subject with (n, d) template vectors and (n,) qualities, n >= 1, and the decision rules of its gallery."""

    vectors: Float
    qualities: Float
    fusion: Fusion
    model: ImpostorRisk | None
    review_factor: float = REVIEW_FACTOR


@dataclass(frozen=True)
class PairSimilarity:
    """Similarity of two sides, in [-1, 1], and the number of ``trials`` of ``model`` behind it."""

    similarity: float
    model: ImpostorRisk | None
    trials: int
    review_factor: float = REVIEW_FACTOR


def compare(a: Float | EnrolledSubject, b: Float | EnrolledSubject, pack_risk: ImpostorRisk | None) -> PairSimilarity:
    """Compare two sides, each a subject or the (d,) vector of a face.

    A face and a subject are compared with the gallery's fusion rule and calibration, as in a search of one subject. Two
    faces use the pack's calibration. Two subjects use it too: the score is the highest of all template pairs.
    """
    if isinstance(a, EnrolledSubject):
        if not isinstance(b, EnrolledSubject):
            return _with_subject(b, a)
        pairs = a.vectors @ b.vectors.T
        return PairSimilarity(_cosine(pairs.max()), pack_risk, pairs.size, min(a.review_factor, b.review_factor))
    if isinstance(b, EnrolledSubject):
        return _with_subject(a, b)
    return PairSimilarity(_cosine(np.dot(a, b)), pack_risk, 1)


def _with_subject(probe: Float, subject: EnrolledSubject) -> PairSimilarity:
    count = len(subject.vectors)
    (fused,) = fuse_similarities(
        probe[None], subject.vectors, np.zeros(count, np.int64), subject.qualities, subject.fusion
    )[0]
    model = subject.model
    if model is not None:
        # Strangers score higher against a subject with more templates. In a search the subjects' template counts
        # average out; against a single subject its own count matters.
        model = replace(model, comparisons_per_subject=max(1.0, count / model.mean_templates))
    return PairSimilarity(_cosine(fused), model, 1, subject.review_factor)


def _cosine(similarity: float) -> float:
    return float(np.clip(similarity, -1, 1))

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
    known: ImpostorRisk | None
    review_factor: float = REVIEW_FACTOR


@dataclass(frozen=True)
class Comparison:
    """Similarity of two sides, in [-1, 1], and the number of ``comparisons`` of ``known`` behind it."""

    similarity: float
    known: ImpostorRisk | None
    comparisons: int
    review_factor: float = REVIEW_FACTOR


def compare(a: Float | EnrolledSubject, b: Float | EnrolledSubject, pack_risk: ImpostorRisk | None) -> Comparison:
    """Compare two sides, each a subject or the (d,) vector of a face.

    A face and a subject are compared with the gallery's fusion rule and calibration, as in a search of one subject. Two
    faces use the pack's calibration. Two subjects use it too: the score is the highest of all template pairs.
    """
    if isinstance(a, EnrolledSubject):
        if not isinstance(b, EnrolledSubject):
            return _with_subject(b, a)
        pairs = a.vectors @ b.vectors.T
        return Comparison(_cosine(pairs.max()), pack_risk, pairs.size, min(a.review_factor, b.review_factor))
    if isinstance(b, EnrolledSubject):
        return _with_subject(a, b)
    return Comparison(_cosine(np.dot(a, b)), pack_risk, 1)


def _with_subject(probe: Float, subject: EnrolledSubject) -> Comparison:
    count = len(subject.vectors)
    (fused,) = fuse_similarities(
        probe[None], subject.vectors, np.zeros(count, np.int64), subject.qualities, subject.fusion
    )[0]
    known = subject.known
    if known is not None:
        # Strangers score higher against a subject with more templates. In a search the subjects' template counts
        # average out; against a single subject its own count matters.
        known = replace(known, comparisons_per_subject=max(1.0, count / known.mean_templates))
    return Comparison(_cosine(fused), known, 1, subject.review_factor)


def _cosine(similarity: float) -> float:
    return float(np.clip(similarity, -1, 1))

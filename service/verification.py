"""Two sides of a verification: how alike, and by whose evidence that is judged. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from models.network import Float
from service.decision import REVIEW_FACTOR, KnownRisk
from service.gallery.fusion import Fusion, scores


@dataclass(frozen=True, eq=False)
class Enrolled:
    """A subject: its (n, d) templates of (n,) qualities, n >= 1, and how its gallery decides.

    ``known``: what the gallery knows of strangers.
    """

    vectors: Float
    qualities: Float
    fusion: Fusion
    known: KnownRisk | None
    review_factor: float = REVIEW_FACTOR


@dataclass(frozen=True)
class Comparison:
    """``comparisons``: of ``known``'s kind, each a chance for two strangers to be as alike as ``similarity``, in
    [-1, 1]."""

    similarity: float
    known: KnownRisk | None
    comparisons: int
    review_factor: float = REVIEW_FACTOR


def compare(a: Float | Enrolled, b: Float | Enrolled, of_pack: KnownRisk | None) -> Comparison:
    """How alike two sides are, each a subject or the (d,) vector of a face.

    A face meets a subject as in a search: by the gallery's rule of fusion, judged by what the gallery knows of
    strangers, as its one subject. Two faces are judged by the pack's calibration; so are two subjects, of whose
    templates every one of one side meets every one of the other, and the best counts.
    """
    if isinstance(a, Enrolled):
        if not isinstance(b, Enrolled):
            return _with_subject(b, a)
        pairs = a.vectors @ b.vectors.T
        return Comparison(_cosine(pairs.max()), of_pack, pairs.size, min(a.review_factor, b.review_factor))
    if isinstance(b, Enrolled):
        return _with_subject(a, b)
    return Comparison(_cosine(np.dot(a, b)), of_pack, 1)


def _with_subject(probe: Float, subject: Enrolled) -> Comparison:
    count = len(subject.vectors)
    (fused,) = scores(probe[None], subject.vectors, np.zeros(count, np.int64), subject.qualities, subject.fusion)[0]
    known = subject.known
    if known is not None:
        # Strangers reach a subject of more templates more easily: each is a chance, and a mean of many is nearer to
        # everybody. The pack compared photo with photo; the gallery's subjects, together, make up for one another in a
        # search, but not here.
        known = replace(known, per_subject=max(1.0, count / known.usual_templates))
    return Comparison(_cosine(fused), known, 1, subject.review_factor)


def _cosine(similarity: float) -> float:
    return float(np.clip(similarity, -1, 1))

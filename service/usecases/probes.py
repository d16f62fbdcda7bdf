"""Probes of an identification: the faces of photos and the embeddings of a request, and the result of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from models.runtime.network import Float
from models.vision.quality_gate import QualityGate
from service.core.errors import ImageError, KithError
from service.domain.gallery import Gallery, SubjectLabel
from service.domain.outcomes import RiskTarget
from service.inference.photo_pipeline import Face, Photo, verdict_of
from service.inference.recognizers import ServedRecognizer, check_vectors
from service.risk.decision import Candidate, refuse_presentation
from service.risk.search import Identification
from service.usecases.documents import (
    DEFAULT_GATE,
    Document,
    face_document,
    problem_document,
    risk_document,
    without_none,
)


@dataclass
class Probe:
    """One result of the response.

    ``document``: ``IdentityOut``. ``vector``: the (d,) probe, None if nothing is searched. ``face``: None for an
    embedding. ``found``: result of the search. ``is_weak``: no face of its photo is confident. Such a photo is often
    not upright, and its faces are then useless.
    """

    document: Document
    vector: Float | None = None
    face: Face | None = None
    found: Identification | None = None
    is_weak: bool = False


def photo_probes(
    gallery: Gallery, photos: list[Photo | ImageError], quality_gate: QualityGate | None
) -> Iterator[Probe]:
    """Return an item per face, and one per photo without a face. Raises liveness_unavailable."""
    for i, photo in enumerate(photos):
        if isinstance(photo, KithError):
            yield Probe(_result(image=i, outcome="error", error=problem_document(photo)))
            continue
        if not photo.faces:
            yield Probe(_result(image=i, outcome="no_face"))
        for face in photo.faces:
            quality = quality_gate.reasons(face.quality) if quality_gate else []
            document = face_document(face, quality_gate or DEFAULT_GATE, gallery.settings.liveness_threshold)
            refusal, reasons = refuse_presentation(quality, verdict_of(gallery, face))
            result = _result(image=i, face=document, outcome=refusal or "unknown", reasons=reasons)
            yield Probe(result, None if refusal else face.vector, face, is_weak=not photo.is_confident)


def embedding_probes(gallery: Gallery, embeddings: list[Any], served: ServedRecognizer) -> Iterator[Probe]:
    for i, vector in enumerate(check_vectors(embeddings, served.dimension)):
        refusal, reasons = refuse_presentation([], verdict_of(gallery, None))
        result = _result(embedding=i, outcome=refusal or "unknown", reasons=reasons)
        yield Probe(result, None if refusal else vector)


def _result(**fields: Any) -> Document:
    return {"candidates": [], "reasons": [], **fields}


def decision_fields(found: Identification, named: dict[int, SubjectLabel], target: RiskTarget) -> Document:
    """Return the fields that a search adds to an ``IdentityOut``."""
    decision, best, thresholds = found.decision, found.decision.best, found.shown_thresholds
    subject = named[best.subject_pk] if decision.outcome == "identified" and best is not None else None
    probability, is_bound = found.shown_probability(best) if best else (None, None)
    return without_none(
        outcome=decision.outcome,
        subject=subject.id if subject else None,
        name=subject.name if subject else None,
        similarity=round(best.similarity, 4) if best else None,
        threshold=round(thresholds.accept, 4),
        review_threshold=round(thresholds.review, 4),
        runner_up=_candidate_document(decision.runner_up, found, named) if decision.runner_up else None,
        margin=round(decision.margin, 4) if decision.margin is not None else None,
        false_alarm_probability=probability,
        probability_is_bound=is_bound,
        risk=risk_document(target, thresholds),
        reasons=[*(["risk_out_of_reach"] if found.thresholds.out_of_reach else []), *found.reasons],
        other_face=found.other_face,
        candidates=[_candidate_document(candidate, found, named) for candidate in found.candidates],
    )


def _candidate_document(candidate: Candidate, found: Identification, named: dict[int, SubjectLabel]) -> Document:
    subject = named[candidate.subject_pk]
    probability, is_bound = found.shown_probability(candidate)
    return without_none(
        subject=subject.id,
        name=subject.name,
        similarity=round(candidate.similarity, 4),
        false_alarm_probability=probability,
        probability_is_bound=is_bound,
    )

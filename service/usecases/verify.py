"""Verification (1:1) of two sides: photos or embeddings, one of them perhaps an enrolled subject."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import get_args

from kith.wire.risk import PRESETS, RiskIn
from kith.wire.verification import SideIn, VerifyIn
from models.runtime.network import Float
from models.vision.liveness import LivenessVerdict
from service.core.actor import gather_or_cancel
from service.core.errors import InvalidRequestError, RecognizerMismatchError, RefusedError
from service.domain.gallery import Gallery, GallerySettings, SubjectFaces
from service.domain.outcomes import RejectionOutcome, RiskTarget, to_risk_target
from service.inference.recognizers import ServedRecognizer, check_recognizer, check_vectors
from service.risk.decision import (
    compare_faces,
    compare_with_subject,
    decide_pair,
    refuse_presentation,
)
from service.risk.threshold import false_alarm_probability, thresholds_for
from service.security.api_keys import Caller
from service.storage.repositories.store import Store
from service.usecases.backend import Backend
from service.usecases.documents import Document, face_document, risk_document, without_none


@dataclass(frozen=True)
class Verification:
    """Request with what its two sides share.

    ``gallery``: that of the enrolled subject, None if no side is one. ``liveness_threshold``: None if liveness is not
    required.
    """

    body: VerifyIn
    gallery: Gallery | None
    served: ServedRecognizer
    liveness_threshold: float | None

    @property
    def settings(self) -> GallerySettings:
        return GallerySettings() if self.gallery is None else self.gallery.settings

    def target(self, risk: RiskIn | None) -> RiskTarget:
        """Return the requested risk, or the gallery's if a side is a subject. An FPIR applies to searches only."""
        if risk is not None:
            return to_risk_target(risk, "fmr")
        if self.settings.risk.kind != "fpir":
            return self.settings.risk
        return RiskTarget("fmr", PRESETS["standard"])


@dataclass(frozen=True, eq=False)
class _SideResult:
    """One side of the comparison.

    ``person``: a (d,) vector or an enrolled subject; None if the photo has no face. ``document``: ``SideOut``.
    ``liveness``: None if it is not required.
    """

    person: Float | SubjectFaces | None
    document: Document = field(default_factory=dict)
    quality_reasons: list[str] = field(default_factory=list)
    liveness: LivenessVerdict | None = None


async def verify(backend: Backend, body: VerifyIn, caller: Caller) -> Document:
    """Compare the sides of ``body``, record the outcome, and return a ``VerifyOut``.

    Raises:
        GalleryNotFoundError, SubjectNotFoundError: a side is a subject that the caller may not see or that is missing.
        ForbiddenError: a side is a subject, the other an embedding or the risk chosen, and the caller lacks the scope
            vectors.
        ImageError, RecognizerMismatchError, model_not_served, liveness_unavailable: a side cannot be compared.
    """
    sides = (body.a, body.b)
    subject = next((side.subject for side in sides if side.subject), None)
    gallery = None
    if subject is not None:
        caller.check_gallery(subject.gallery)
        gallery = await backend.find_gallery(subject.gallery)
        if any(side.embedding is not None for side in sides):
            caller.check_vectors("embeddings")
    served = _choose_recognizer(backend, body, gallery)
    verification = Verification(body, gallery, served, _liveness_threshold(backend, body, gallery))
    if gallery is not None and verification.target(body.risk) != verification.target(None):
        caller.check_vectors("risks other than the gallery's")
    a, b = await gather_or_cancel([_process_side(backend, side, verification) for side in sides])
    refusals = {
        "a": refuse_presentation(a.quality_reasons, a.liveness),
        "b": refuse_presentation(b.quality_reasons, b.liveness),
    }
    reasons = [f"{name}: {reason}" for name, (_, reasons) in refusals.items() for reason in reasons]
    document: Document = {"model": served.pack.model_id, "a": a.document, "b": b.document, "reasons": reasons}
    if a.person is None or b.person is None:
        document["outcome"] = "no_face"
    else:
        refused = {refusal for refusal, _ in refusals.values()}
        refusal = next((each for each in get_args(RejectionOutcome) if each in refused), None)
        await _compare_sides(backend, verification, caller, (a.person, b.person), document)
        document["outcome"] = refusal or document["outcome"]
    backend.metrics.verified.labels(document["outcome"]).inc()
    if gallery is not None and subject is not None:
        await backend.audit.verified(gallery, subject.subject, document["outcome"])
    return document


async def _compare_sides(
    backend: Backend,
    verification: Verification,
    caller: Caller,
    persons: tuple[Float | SubjectFaces, Float | SubjectFaces],
    document: Document,
) -> None:
    """Add the comparison to ``document``. One of ``persons`` may be a subject."""
    face, other = persons[::-1] if isinstance(persons[0], SubjectFaces) else persons
    assert not isinstance(face, SubjectFaces)  # noqa: S101 - VerifyIn refuses two subjects
    if isinstance(other, SubjectFaces):
        assert verification.gallery is not None  # noqa: S101 - that of the subject
        model = await backend.threads.run(backend.risks.current, verification.gallery)
        compared = await backend.threads.run(compare_with_subject, face, other, model)  # of thousands of templates
    else:
        compared = compare_faces(face, other, backend.risks.of_pack(verification.served.fingerprint))
    target = verification.target(verification.body.risk)
    # A rate is for all comparisons of the pair together: a subject has several templates.
    joint = replace(target, kind="fpir") if target.kind == "fmr" else target
    thresholds = thresholds_for(joint, compared.model, 1, verification.settings.review_factor)
    similarity: float | None = compared.similarity
    if verification.gallery is not None and not caller.sees_vectors:
        similarity = thresholds.coarse(compared.similarity)
    if thresholds.out_of_reach:
        document["reasons"].append("risk_out_of_reach")
    probability, is_bound = None, None
    if similarity is not None:
        probability, is_bound = false_alarm_probability(similarity, compared.model, 1)
    outcome, reasons = decide_pair(compared.similarity, thresholds, compared.decoy)
    document["reasons"] += reasons
    document |= without_none(
        outcome=outcome,
        similarity=None if similarity is None else round(similarity, 4),
        threshold=round(thresholds.accept, 4),
        review_threshold=round(thresholds.review, 4),
        false_match_probability=probability,
        probability_is_bound=is_bound,
        risk=risk_document(target, thresholds),
    )


def _choose_recognizer(backend: Backend, body: VerifyIn, gallery: Gallery | None) -> ServedRecognizer:
    """Return the requested recognizer, else that of the subjects' gallery, else the default.

    Raises:
        model_not_served: the recognizer is not served.
        RecognizerMismatchError: a subject or embedding is of another recognizer, or an embedding names none and the
            gallery has, or had, vectors of two.
    """
    if body.model is not None or gallery is None:
        served = backend.recognizers.by_name(body.model)
    else:
        served = backend.recognizers.for_gallery(gallery)
    if gallery is not None:
        check_recognizer(gallery, served.fingerprint)
    for side in (body.a, body.b):
        if gallery is not None and side.embedding is not None and body.model is None:
            check_recognizer(gallery, side.recognizer)
        if side.recognizer not in (None, served.fingerprint):
            raise RecognizerMismatchError(
                f"an embedding of {side.recognizer[:12]} cannot be compared by {served.fingerprint[:12]}"
            )
    return served


def _liveness_threshold(backend: Backend, body: VerifyIn, gallery: Gallery | None) -> float | None:
    """Return the minimum score of a live face, None if liveness is not required.

    A request may require liveness where the gallery does not. It cannot lower the gallery's threshold.

    Raises liveness_unavailable: liveness is required and the served pack has no liveness model.
    """
    required = gallery is not None and gallery.settings.liveness == "required"
    if not required and not body.require_liveness:
        return None
    if backend.photos.judge is None:
        raise RefusedError(
            "liveness_unavailable", "liveness is required, and the served model pack has no liveness model"
        )
    own = gallery.settings.liveness_threshold if gallery is not None and required else None
    return backend.photos.judge.spec.threshold if own is None else own


async def _process_side(backend: Backend, side: SideIn, verification: Verification) -> _SideResult:
    threshold = verification.liveness_threshold
    if side.embedding is not None:
        (vector,) = check_vectors([side.embedding], verification.served.dimension)
        return _SideResult(vector, liveness=None if threshold is None else "not_judged")
    if side.subject is not None:
        assert verification.gallery is not None  # noqa: S101 - that of the subject
        return _SideResult(
            await backend.threads.run(_read_subject, backend.store, verification.gallery, side.subject.subject)
        )
    detail = verification.body.detail or backend.settings.expected_face_detail
    photo = await backend.photos.embed(side.url or side.image or b"", verification.served, detail=detail)
    if not photo.faces:
        return _SideResult(None, {"face_count": 0}, ["no_face"])
    quality_gate = verification.settings.quality_gate
    face = photo.faces[photo.main_face(quality_gate)[0]]
    assert face.vector is not None  # noqa: S101 - embed sets the vector of every face
    document = {"face": face_document(face, quality_gate, threshold), "face_count": photo.face_count}
    liveness: LivenessVerdict | None = None
    if threshold is not None:
        liveness = "not_judged" if face.liveness is None else face.liveness.verdict(threshold)
    return _SideResult(face.vector, document, quality_gate.reasons(face.quality), liveness)


def _read_subject(store: Store, gallery: Gallery, subject_id: str) -> SubjectFaces:
    """Raises SubjectNotFoundError, or InvalidRequestError for a subject without templates."""
    vectors, qualities = store.templates.vectors(gallery, subject_id)
    if not len(vectors):
        raise InvalidRequestError(f"subject {subject_id!r} has no template")
    return SubjectFaces(vectors, qualities, store.decoys.vectors(gallery, subject_id) if gallery.outsiders else None)

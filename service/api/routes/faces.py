"""Faces: detection, embedding, and verification (1:1) of two photos, embeddings or subjects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from fastapi import APIRouter, Request, Response

from kith.wire.faces import FacesOut
from kith.wire.verification import VerifyOut
from models.runtime.network import Float
from models.vision.quality_gate import LivenessVerdict, QualityGate
from service.api.http.bodies import read_photos, read_verify
from service.api.http.context import Context, ContextDep
from service.api.http.openapi import PROBLEMS, request_body
from service.api.http.permissions import Caller
from service.api.http.photos import fetch_photo, gather_or_cancel, process_photos
from service.api.http.probe_budget import NEAR_MISS_COST, PHOTO_NEAR_MISS_COST
from service.api.http.responses import (
    DEFAULT_GATE,
    Document,
    face_document,
    json_response,
    photo_document,
    risk_document,
    without_none,
)
from service.api.http.routing import CallerDep, PermittedRoute
from service.core.errors import InvalidRequestError, LivenessUnavailableError, RecognizerMismatchError
from service.domain.gallery import Gallery
from service.domain.outcomes import RejectionOutcome, RiskTarget
from service.inference.photo_pipeline import Photo
from service.inference.recognizers import ServedRecognizer, check_recognizer, check_vectors
from service.risk.decision import (
    decide_pair,
    false_alarm_probability,
    refuse_presentation,
    review_floor,
    shown_probability,
    thresholds_for,
)
from service.risk.verification import EnrolledSubject, compare
from service.schemas.faces import DetectIn, EmbedIn
from service.schemas.risk import RiskIn
from service.schemas.verification import SideIn, VerifyIn

router = APIRouter(route_class=PermittedRoute, tags=["faces"], responses=PROBLEMS)


@router.post("/v1/detect", response_model=FacesOut, openapi_extra=request_body(DetectIn))
async def detect(request: Request, context: ContextDep) -> Response:
    """Detect the faces in one or more photos: boxes, five landmarks, scores and quality."""
    with context.metrics.stage("read"):
        body = await read_photos(request, DetectIn, context.settings)
    detail = body.detail or context.settings.detail
    photos = await process_photos(context, body.photos, lambda payload: context.pipeline.photos.detect(payload, detail))
    return json_response(
        {"model": context.recognizers.default.pack.model_id, "images": [photo_document(photo) for photo in photos]}
    )


@router.post("/v1/embed", response_model=FacesOut, openapi_extra=request_body(EmbedIn))
async def embed(request: Request, context: ContextDep) -> Response:
    """Detect the faces in one or more photos and compute the embedding of each, a unit vector."""
    with context.metrics.stage("read"):
        body = await read_photos(request, EmbedIn, context.settings)
    by, detail = context.recognizers.by_name(body.model), body.detail or context.settings.detail

    async def process(payload: bytes) -> Photo:
        return await context.pipeline.photos.embed(payload, by, detail=detail)

    photos = await process_photos(context, body.photos, process)
    images = [photo_document(photo) for photo in photos]
    return json_response({"model": by.pack.model_id, "recognizer": by.fingerprint, "images": images})


@dataclass(frozen=True)
class Verification:
    """Request with what its two sides share.

    ``galleries``: by name, those of enrolled subjects. ``liveness_threshold``: None if liveness is not required.
    """

    body: VerifyIn
    galleries: dict[str, Gallery]
    served: ServedRecognizer
    liveness_threshold: float | None

    @property
    def quality_gate(self) -> QualityGate:
        return next((gallery.settings.quality_gate for gallery in self.galleries.values()), DEFAULT_GATE)

    def target(self, risk: RiskIn | None) -> RiskTarget:
        """Return the requested risk, or the gallery's if one side is a subject. An FPIR applies to searches only."""
        if risk is not None:
            return risk.target("fmr")
        subjects = [side.subject for side in (self.body.a, self.body.b) if side.subject]
        if len(subjects) == 1:
            own = self.galleries[subjects[0].gallery].settings.risk
            if own.kind != "fpir":
                return own
        return RiskIn(preset="standard").target("fmr")


@dataclass(frozen=True, eq=False)
class _SideResult:
    """One side of the comparison.

    ``person``: a (d,) vector or an enrolled subject; None if the photo has no face. ``document``: ``SideOut``.
    ``liveness``: None if it is not required.
    """

    person: Float | EnrolledSubject | None
    document: Document = field(default_factory=dict)
    quality_reasons: list[str] = field(default_factory=list)
    liveness: LivenessVerdict | None = None


@router.post("/v1/verify", response_model=VerifyOut, openapi_extra=request_body(VerifyIn, ("a", "b")))
async def verify(request: Request, context: ContextDep, caller: CallerDep) -> Response:
    """Decide if two sides are the same person. Each is a photo (its largest face), an embedding, or a subject.

    If a side is a subject and the caller lacks the scope admin, the similarity is coarse, or left out below the review
    threshold, and no threshold is lower than the review threshold of the gallery's own risk.
    """
    with context.metrics.stage("read"):
        body = await read_verify(request, context.settings, context.recognizers.largest_dimension)
    sides = (body.a, body.b)
    names = [side.subject.gallery for side in sides if side.subject]
    for name in names:
        caller.check_gallery(name)
    galleries = {name: await context.find_gallery(name) for name in names}
    # An enrolled embedding is a probe as well. Photos cannot be chosen as freely, but thresholds can.
    photo = any(_is_photo(side) for side in sides)
    cost = PHOTO_NEAR_MISS_COST if photo else NEAR_MISS_COST
    chosen_risk = body.risk is not None and not caller.may_export
    probed = galleries[names[0]] if names and (chosen_risk or not photo) else None
    async with context.probes.taken(caller, probed, int(not photo), int(photo)):
        return await _verify(context, body, caller, galleries, probed, cost)


async def _verify(
    context: Context, body: VerifyIn, caller: Caller, galleries: dict[str, Gallery], probed: Gallery | None, cost: int
) -> Response:
    sides = (body.a, body.b)
    served = _choose_recognizer(context, body, list(galleries.values()))
    verification = Verification(body, galleries, served, _liveness_threshold(context, body, list(galleries.values())))
    a, b = await gather_or_cancel([_process_side(context, side, verification) for side in sides])
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
        near_miss = compare_sides(context, verification, caller, (a.person, b.person), cost == NEAR_MISS_COST, document)
        document["outcome"] = refusal or document["outcome"]
        if probed is not None:
            await context.probes.charge_near_misses(caller, probed, int(near_miss), cost)
    await _record(context, body, galleries, document["outcome"])
    return json_response(document)


def compare_sides(
    context: Context,
    verification: Verification,
    caller: Caller,
    persons: tuple[Float | EnrolledSubject, Float | EnrolledSubject],
    chosen_probe: bool,
    document: Document,
) -> bool:
    """Add the comparison to ``document`` and return True for a near miss. ``chosen_probe``: no side is a photo."""
    compared = compare(*persons, context.pipeline.risks.of_pack(verification.served.fingerprint))
    target = verification.target(verification.body.risk)
    parameters = (compared.known, compared.comparisons, compared.review_factor)
    thresholds = thresholds_for(_joint(target), *parameters)
    similarity: float | None = compared.similarity
    near_miss = False
    if verification.galleries:
        floor = review_floor(_joint(verification.target(None)), *parameters)
        if not caller.may_export:
            thresholds = thresholds.at_least(floor)
            similarity = thresholds.coarse(compared.similarity, photo=not chosen_probe)
        near_miss = floor <= compared.similarity < thresholds.accept
    if thresholds.out_of_reach:
        document["reasons"].append("risk_out_of_reach")
    probability = None
    if similarity is not None:
        chance = false_alarm_probability(similarity, compared.known, compared.comparisons)
        probability = shown_probability(chance, compared.known, compared.comparisons)
    document |= without_none(
        outcome=decide_pair(compared.similarity, thresholds),
        similarity=None if similarity is None else round(similarity, 4),
        threshold=round(thresholds.accept, 4),
        review_threshold=round(thresholds.review, 4),
        false_match_probability=probability,
        risk=risk_document(target, thresholds),
    )
    return near_miss


async def _record(context: Context, body: VerifyIn, galleries: dict[str, Gallery], outcome: str) -> None:
    """Write the metric, and an audit entry for each enrolled subject."""
    context.metrics.count_verification(outcome)
    for side in (body.a, body.b):
        if side.subject:
            await context.audit.verified(galleries[side.subject.gallery], side.subject.subject, outcome)


def _is_photo(side: SideIn) -> bool:
    return side.embedding is None and side.subject is None


def _joint(target: RiskTarget) -> RiskTarget:
    """Return a target for all comparisons of a pair together: a subject has several templates."""
    return RiskTarget("fpir", target.value) if target.kind == "fmr" else target


def _choose_recognizer(context: Context, body: VerifyIn, galleries: list[Gallery]) -> ServedRecognizer:
    """Return the requested recognizer, else that of the subjects' gallery, else the default.

    Raises:
        ModelNotServedError: the recognizer is not served.
        RecognizerMismatchError: a subject or embedding is of another recognizer, or an embedding names none and the
            gallery has, or had, vectors of two.
    """
    if body.model is not None or not galleries:
        served = context.recognizers.by_name(body.model)
    else:
        served = context.recognizers.for_gallery(galleries[0])
    for gallery in galleries:
        check_recognizer(gallery, served.fingerprint)
        for side in (body.a, body.b):
            if side.embedding is not None and body.model is None:
                check_recognizer(gallery, side.recognizer)
    for side in (body.a, body.b):
        if side.recognizer not in (None, served.fingerprint):
            raise RecognizerMismatchError(
                f"an embedding of {side.recognizer[:12]} cannot be compared by {served.fingerprint[:12]}"
            )
    return served


def _liveness_threshold(context: Context, body: VerifyIn, galleries: list[Gallery]) -> float | None:
    """Return the minimum score of a live face, None if liveness is not required.

    A request may require liveness where the galleries do not. It cannot lower their threshold.

    Raises LivenessUnavailableError: liveness is required and the served pack has no liveness model.
    """
    required = [gallery.settings for gallery in galleries if gallery.settings.liveness == "required"]
    if not required and not body.require_liveness:
        return None
    if context.pipeline.photos.judge is None:
        raise LivenessUnavailableError("liveness is required, and the served model pack has no liveness model")
    default = context.pipeline.photos.judge.spec.threshold
    thresholds = [default if each.liveness_threshold is None else each.liveness_threshold for each in required]
    return max(thresholds, default=default)


async def _process_side(context: Context, side: SideIn, verification: Verification) -> _SideResult:
    threshold = verification.liveness_threshold
    if side.embedding is not None:
        (vector,) = check_vectors([side.embedding], verification.served.dimension)
        return _SideResult(vector, liveness=None if threshold is None else "not_judged")
    if side.subject is not None:
        gallery = verification.galleries[side.subject.gallery]
        return _SideResult(await context.run(_read_subject, context, gallery, side.subject.subject))
    payload = side.image or b"" if side.url is None else await fetch_photo(context, side.url)
    detail = verification.body.detail or context.settings.expected_face_detail
    photo = await context.pipeline.photos.embed(payload, verification.served, detail=detail)
    if not photo.faces:
        return _SideResult(None, {"faces_found": 0}, ["no_face"])
    face = photo.largest()
    assert face.vector is not None  # noqa: S101 - embed sets the vector of every face
    quality_gate = verification.quality_gate
    document = {"face": face_document(face, quality_gate, threshold), "faces_found": len(photo.faces)}
    liveness: LivenessVerdict | None = None
    if threshold is not None:
        liveness = "not_judged" if face.liveness is None else face.liveness.verdict(threshold)
    return _SideResult(face.vector, document, quality_gate.reasons(face.quality), liveness)


def _read_subject(context: Context, gallery: Gallery, subject_id: str) -> EnrolledSubject:
    """Raises SubjectNotFoundError, or InvalidRequestError for a subject without templates."""
    vectors, qualities = context.store.templates.vectors(gallery, subject_id)
    if not len(vectors):
        raise InvalidRequestError(f"subject {subject_id!r} has no template")
    known, settings = context.pipeline.risks.of(gallery), gallery.settings
    return EnrolledSubject(vectors, qualities, settings.fusion, known, settings.review_factor)

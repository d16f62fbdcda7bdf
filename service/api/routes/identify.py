"""Open-set identification (1:N) of faces and embeddings in a gallery."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from fastapi import APIRouter, Request, Response

from kith.wire.identification import IdentifyOut
from models.runtime.network import Float
from models.vision.quality_gate import QualityGate
from service.api.http.bodies import read_photos
from service.api.http.context import Context, ContextDep
from service.api.http.openapi import PROBLEMS, request_body
from service.api.http.parameters import GalleryPath
from service.api.http.permissions import Caller
from service.api.http.photos import process_photos
from service.api.http.probe_budget import PHOTO_NEAR_MISS_COST
from service.api.http.responses import (
    DEFAULT_GATE,
    Document,
    face_document,
    json_response,
    problem_document,
    risk_document,
    without_none,
)
from service.api.http.routing import CallerDep, PermittedRoute
from service.core import deadlines
from service.core.errors import GalleryNotFoundError, KithError, StorageDamagedError
from service.core.photo_errors import ImageError
from service.domain.events import Event
from service.domain.gallery import Gallery, Keys, SubjectFilter, SubjectLabel
from service.domain.outcomes import RiskTarget
from service.inference.photo_pipeline import Face, Photo, verdict_of
from service.inference.recognizers import ServedRecognizer, check_recognizer, check_vectors
from service.risk.decision import SIMILARITY_STEP, Candidate, refuse_presentation
from service.risk.drift import Decided
from service.schemas.identification import IdentifyIn
from service.services.pipeline import Identification
from service.services.shadow import AnsweredFace

EVENT_FIELDS: Final = (
    "outcome",
    "subject",
    "name",
    "similarity",
    "threshold",
    "review_threshold",
    "false_alarm_probability",
    "risk",
    "reasons",
)
"""Fields of a result that its event has."""
router = APIRouter(route_class=PermittedRoute, tags=["identify"], responses=PROBLEMS)


@dataclass
class ProbeResult:
    """One result of the response.

    ``document``: ``IdentityOut``. ``vector``: the (d,) probe, None if nothing is searched. ``face``: None for an
    embedding. ``found``: result of the search.
    """

    document: Document
    vector: Float | None = None
    face: Face | None = None
    found: Identification | None = None


@router.post("/v1/galleries/{gallery}/identify", response_model=IdentifyOut, openapi_extra=request_body(IdentifyIn))
async def identify(gallery: GalleryPath, request: Request, context: ContextDep, caller: CallerDep) -> Response:
    """Decide for each face of the photos, for the largest face of each photo, or for given embeddings.

    Without the scope admin, similarities are coarse, candidates below the review threshold are left out, and no
    threshold is lower than the review threshold of the gallery's own risk.
    """
    with context.metrics.stage("read"):
        body = await read_photos(request, IdentifyIn, context.settings, context.recognizers.largest_dimension)
    found = await context.find_gallery(gallery)
    served, items = await identify_in(context, found, body, caller)
    return json_response(
        {
            "gallery": found.name,
            "model": served.pack.model_id,
            "recognizer": served.fingerprint,
            "results": [item.document for item in items],
        }
    )


async def identify_in(
    context: Context, found: Gallery, body: IdentifyIn, caller: Caller
) -> tuple[ServedRecognizer, list[ProbeResult]]:
    """Identify the photos and embeddings of ``body`` within the caller's probe budget, and record the decisions.

    Raises as :func:`search_gallery`, ``ProbeBudget.taken``, and for a single photo its own error.
    """
    served = context.recognizers.for_gallery(found)
    if body.recognizer is not None or body.embeddings:
        check_recognizer(found, body.recognizer)
    photos = len(body.photos) if _chooses_risk(body, found, caller) else 0
    async with context.probes.taken(caller, found, len(body.embeddings), photos):
        return served, await _identify(context, found, served, body, caller)


def _chooses_risk(body: IdentifyIn, gallery: Gallery, caller: Caller) -> bool:
    """Return True if a caller without exact answers requests a risk other than the gallery's."""
    return body.risk is not None and body.risk.target("fpir") != gallery.settings.risk and not caller.may_export


async def _identify(
    context: Context, found: Gallery, served: ServedRecognizer, body: IdentifyIn, caller: Caller
) -> list[ProbeResult]:
    target = body.risk.target("fpir") if body.risk else found.settings.risk
    among = None
    if body.filter is not None:
        subject_filter = SubjectFilter(tuple(body.filter.tags), tuple(body.filter.metadata.items()))
        among = await context.run(context.store.subjects.matching_pks, found, subject_filter)

    shadow = None
    if found.other is not None and found.other.state == "shadow":
        shadow = context.recognizers.get(found.other.fingerprint)

    detail = body.detail or context.settings.detail

    async def embed(payload: bytes) -> Photo:
        return await context.pipeline.photos.embed(payload, served, shadow, detail, body.faces == "largest")

    photos = await process_photos(context, body.photos, embed) if body.photos else []
    quality_gate = found.settings.quality_gate if body.check_quality else None
    items = [*_photo_items(found, photos, quality_gate), *_embedding_items(found, body.embeddings, served)]
    searched = [item for item in items if item.vector is not None]
    if searched:
        if photos:
            found = _at_current_version(found, await context.find_gallery(found.name))
        probes = np.stack([item.vector for item in searched if item.vector is not None])
        # Thresholds must not depend on embeddings that a caller without exact answers chooses.
        watched = sum(caller.may_export or item.face is not None for item in searched)
        results, names = await search_gallery(
            context, found, probes, target, body.top_k, among, not caller.may_export, watched
        )
        for item, result in zip(searched, results, strict=True):
            item.found = result
            shown = result if caller.may_export else result.coarse(photo=item.face is not None)
            item.document |= _decision_fields(shown, names, target)
        _observe_similarities(context, served, searched)
        if shadow is not None:
            answered = [AnsweredFace(item.face, item.found) for item in searched if item.face and item.found]
            context.shadow.observe(found, answered, target, among)
        near_misses = sum(item.found.near_miss for item in searched if item.face is None and item.found)
        await context.probes.charge_near_misses(caller, found, near_misses)
        if _chooses_risk(body, found, caller):
            near_misses = sum(item.found.near_miss for item in searched if item.face is not None and item.found)
            await context.probes.charge_near_misses(caller, found, near_misses, PHOTO_NEAR_MISS_COST)
    events = _events(found, items)
    await context.audit.searched(found, [item.document for item in items], events)
    if events:
        context.webhooks.delivery.wake()
    context.watches.of(found.pk, found.name, found.fingerprint).add(_decisions(items, caller))
    return items


def _events(gallery: Gallery, items: Iterable[ProbeResult]) -> list[Event]:
    """Return the decisions that a webhook wants, as the response states them."""
    if not gallery.listeners:
        return []
    events = [
        Event(
            "decision", {k: item.document[k] for k in EVENT_FIELDS if k in item.document}, item.document.get("subject")
        )
        for item in items
        if item.document["outcome"] != "error"
    ]
    return [event for event in events if any(chosen.wants(gallery.name, event) for chosen in gallery.listeners)]


def _observe_similarities(context: Context, served: ServedRecognizer, items: Iterable[ProbeResult]) -> None:
    """Record the best similarities of photos in the metrics, rounded.

    Embeddings are left out: a caller who chooses them could read their exact similarity from the metrics.
    """
    for item in items:
        best = None if item.found is None else item.found.decision.best
        if item.found is not None and best is not None and item.face is not None:
            rounded = math.ceil(best.similarity / SIMILARITY_STEP) * SIMILARITY_STEP
            context.metrics.observe_similarity(served.pack.model_id, item.found.decision.outcome, rounded)


def _decisions(items: Iterable[ProbeResult], caller: Caller) -> Iterator[Decided]:
    """Return the decisions that the drift watch counts; errors are none.

    Similarities of embeddings are left out for a caller without exact answers: the mean of many equal embeddings would
    reveal theirs.
    """
    for item in items:
        outcome = item.document["outcome"]
        exact = caller.may_export or item.face is not None
        if exact and item.found is not None and item.found.decision.best is not None:
            yield Decided(outcome, item.found.decision.best.similarity, item.found.shown_thresholds.accept)
        elif outcome != "error":
            yield Decided(outcome)


def _photo_items(
    gallery: Gallery, photos: list[Photo | ImageError], quality_gate: QualityGate | None
) -> Iterator[ProbeResult]:
    """Return an item per face, and one per photo without a face. Raises LivenessUnavailableError."""
    for i, photo in enumerate(photos):
        if isinstance(photo, KithError):
            yield ProbeResult(_result(image=i, outcome="error", error=problem_document(photo)))
            continue
        if not photo.faces:
            yield ProbeResult(_result(image=i, outcome="no_face"))
        for face in photo.faces:
            quality = quality_gate.reasons(face.quality) if quality_gate else []
            document = face_document(face, quality_gate or DEFAULT_GATE, gallery.settings.liveness_threshold)
            refusal, reasons = refuse_presentation(quality, verdict_of(gallery, face))
            result = _result(image=i, face=document, outcome=refusal or "unknown", reasons=reasons)
            yield ProbeResult(result, None if refusal else face.vector, face)


def _embedding_items(gallery: Gallery, embeddings: list[Any], served: ServedRecognizer) -> Iterator[ProbeResult]:
    for i, vector in enumerate(check_vectors(embeddings, served.dimension)):
        refusal, reasons = refuse_presentation([], verdict_of(gallery, None))
        result = _result(embedding=i, outcome=refusal or "unknown", reasons=reasons)
        yield ProbeResult(result, None if refusal else vector)


def _result(**fields: Any) -> Document:
    return {"candidates": [], "reasons": [], **fields}


def _at_current_version(gallery: Gallery, current: Gallery) -> Gallery:
    """Return ``gallery`` at the current version, so that writes during photo processing are found as well."""
    if current.pk != gallery.pk or current.version == gallery.version:
        return gallery
    return replace(gallery, version=current.version, subjects=current.subjects, templates=current.templates)


async def search_gallery(
    context: Context,
    gallery: Gallery,
    probes: Float,
    target: RiskTarget,
    k: int,
    among: Keys | None,
    limited: bool = False,
    watched: int = 0,
) -> tuple[list[Identification], dict[int, SubjectLabel]]:
    """Search (q, d) unit vectors and look up the subjects found, again if one was deleted in between.

    Raises:
        GalleryNotFoundError: the gallery was deleted meanwhile, even if a new gallery has its name.
        StorageDamagedError: the index has a subject that the database does not have.
        DeadlineExceededError, ClientGoneError: the deadline passed, or the client disconnected.
    """
    while True:
        results = await context.pipeline.identify(gallery, probes, target, k, among, limited, watched)
        keys = {
            candidate.subject_pk
            for result in results
            for candidate in (*result.candidates, result.decision.best, result.decision.runner_up)
            if candidate
        }
        named = context.store.subjects.cached_names(gallery, keys)
        if named is None:
            named = await context.run(context.store.subjects.names, gallery, keys)
        if keys <= named.keys():
            return results, named
        if (deadline := deadlines.current_deadline()) is not None:
            deadline.check()
        current = await context.find_gallery(gallery.name)
        if current.pk != gallery.pk:
            # The change log has no further entries for the old gallery: its index would keep deleted subjects.
            await context.run(context.followers.drop, gallery)
            raise GalleryNotFoundError(f"gallery {gallery.name!r} was replaced by another during the request")
        if current.version == gallery.version:  # deleting a subject would have changed it
            raise StorageDamagedError(f"templates of gallery {gallery.name!r} belong to missing subjects")
        gallery = _at_current_version(gallery, current)


def _decision_fields(found: Identification, named: dict[int, SubjectLabel], target: RiskTarget) -> Document:
    """Return the fields that a search adds to an ``IdentityOut``."""
    decision, best, thresholds = found.decision, found.decision.best, found.shown_thresholds
    subject = named[best.subject_pk] if decision.outcome == "identified" and best is not None else None
    return without_none(
        outcome=decision.outcome,
        subject=subject.id if subject else None,
        name=subject.name if subject else None,
        similarity=round(best.similarity, 4) if best else None,
        threshold=round(thresholds.accept, 4),
        review_threshold=round(thresholds.review, 4),
        runner_up=_candidate_document(decision.runner_up, found, named) if decision.runner_up else None,
        margin=round(decision.margin, 4) if decision.margin is not None else None,
        false_alarm_probability=found.shown_probability(best) if best else None,
        risk=risk_document(target, thresholds),
        reasons=_risk_reasons(found),
        candidates=[_candidate_document(candidate, found, named) for candidate in found.candidates],
    )


def _risk_reasons(found: Identification) -> list[str]:
    thresholds = found.thresholds
    reasons = ["risk_out_of_reach"] if thresholds.out_of_reach else []
    return [*reasons, "probes_unlike_gallery"] if thresholds.unlike_gallery else reasons


def _candidate_document(candidate: Candidate, found: Identification, named: dict[int, SubjectLabel]) -> Document:
    subject = named[candidate.subject_pk]
    return without_none(
        subject=subject.id,
        name=subject.name,
        similarity=round(candidate.similarity, 4),
        false_alarm_probability=found.shown_probability(candidate),
    )

"""Open-set identification: is this one of the people in the gallery, and how sure may one be?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from models.gate import QualityGate
from models.network import Float
from service import patience
from service.api import answers
from service.api.answers import DEFAULT_GATE, Document, answer, with_values
from service.api.context import Context, Kith
from service.api.galleries import GalleryPath
from service.api.openapi import PROBLEMS, body_of
from service.api.permissions import Asking, Caller, Permitted
from service.api.photos import gather_photos
from service.api.probes import PHOTO_NEAR_MISS_COST
from service.api.requests import read_photos
from service.api.schemas import IdentifyIn, IdentifyOut
from service.decision import SIMILARITY_STEP, Candidate, IdentifyOutcome, RiskTarget
from service.decision import gate as decide_gate
from service.drift import Decided
from service.errors import GalleryNotFoundError, KithError, StorageDamagedError
from service.gallery.index import Keys
from service.gallery.subjects import Gallery, Named, SubjectFilter
from service.liveness import verdict_of
from service.pipeline import Face, Found, Photo
from service.recognisers import Served, check_recogniser, check_vectors
from service.shadow import Answered

router = APIRouter(route_class=Permitted, tags=["identify"], responses=PROBLEMS)


@router.post("/v1/galleries/{gallery}/identify", response_model=IdentifyOut, openapi_extra=body_of(IdentifyIn))
async def identify(gallery: GalleryPath, request: Request, kith: Kith, caller: Asking) -> Response:
    """Decide for every face of the photos, or the largest of each, or given embeddings, at a stated risk.

    Without the scope admin, similarities are coarse, those below the review threshold are left out with their
    candidates, and no threshold is lower than the review threshold of the gallery's own risk.
    """
    with kith.measures.stage("read"):
        body = await read_photos(request, IdentifyIn, kith.settings, kith.recognisers.largest_dimension)
    found = await kith.gallery(gallery)
    by = kith.recognisers.of(found)
    if body.recogniser is not None or body.embeddings:
        check_recogniser(found, body.recogniser)
    photos = len(body.photos) if _chooses_risk(body, found, caller) else 0
    async with (
        kith.probes.taken(caller, found, len(body.embeddings)),
        kith.probes.taken(caller, found, photos, PHOTO_NEAR_MISS_COST),
    ):
        return await _identify(kith, found, by, body, caller)


def _chooses_risk(body: IdentifyIn, gallery: Gallery, caller: Caller) -> bool:
    """Whether photos are compared at a risk that differs from the gallery's, by a caller that gets coarse answers."""
    return body.risk is not None and body.risk.target("fpir") != gallery.settings.risk and not caller.may_export


async def _identify(kith: Context, found: Gallery, by: Served, body: IdentifyIn, caller: Caller) -> Response:
    target = body.risk.target("fpir") if body.risk else found.settings.risk
    among = None
    if body.filter is not None:
        chosen = SubjectFilter(tuple(body.filter.tags), tuple(body.filter.metadata.items()))
        among = await kith.run(kith.store.matching_subjects, found, chosen)

    shadow = None
    if found.other is not None and found.other.state == "shadow":
        shadow = kith.recognisers.get(found.other.fingerprint)

    async def embed(payload: bytes) -> Photo:
        return await kith.pipeline.embed(payload, by, shadow, largest_only=body.faces == "largest")

    photos = await gather_photos(kith, body.photos, embed) if body.photos else []
    vectors = check_vectors(body.embeddings, by.dimension)
    gate = found.settings.quality_gate if body.check_quality else None
    results, probes, faces = _lay_out(found, photos, vectors, gate)
    searched = [row for row, probe in enumerate(probes) if probe is not None]
    decided: dict[int, Found] = {}
    if searched:
        if photos:
            found = _as_of(found, await kith.gallery(found.name))
        stacked = np.stack([probe for probe in probes if probe is not None])
        found_each, named = await _search(kith, found, stacked, target, body.top_k, among, not caller.may_export)
        decided = dict(zip(searched, found_each, strict=True))
        for row, found_one in decided.items():
            told = found_one if caller.may_export else found_one.coarse(photo=faces[row] is not None)
            results[row] |= _decision(told, named, target)
            best = found_one.decision.best
            if best is not None and faces[row] is not None:  # a metric of chosen embeddings would give their similarity
                rounded = math.ceil(best.similarity / SIMILARITY_STEP) * SIMILARITY_STEP
                kith.measures.similarities.of(by.pack.model_id, found_one.decision.outcome).add(rounded)
        if shadow is not None:
            seen = decided.items()
            answered = [Answered(face, found_one) for row, found_one in seen if (face := faces[row]) is not None]
            kith.shadow.observe(found, answered, target, among)
        of_photos = sum(found_one.near_miss for row, found_one in decided.items() if faces[row] is not None)
        of_embeddings = sum(found_one.near_miss for found_one in decided.values()) - of_photos
        await kith.probes.settle(caller, found, of_embeddings)
        if _chooses_risk(body, found, caller):
            await kith.probes.settle(caller, found, of_photos, PHOTO_NEAR_MISS_COST)
    await kith.audit.searched(found, results)
    told_exactly = [caller.may_export or face is not None for face in faces]
    kith.watches.of(found.pk, found.name, found.fingerprint).add(_decided(results, decided, told_exactly))
    return answer({"gallery": found.name, "model": by.pack.model_id, "recogniser": by.fingerprint, "results": results})


def _decided(results: list[Document], searched: dict[int, Found], told_exactly: list[bool]) -> Iterator[Decided]:
    """``told_exactly``: whether the similarity of a result counts. The mean of many equal embeddings would tell it."""
    for row, result in enumerate(results):
        found = searched.get(row)
        if found is not None and found.decision.best is not None and told_exactly[row]:
            yield Decided(result["outcome"], found.decision.best.similarity, found.thresholds.accept)
        elif result["outcome"] != "error":
            yield Decided(result["outcome"])


def _lay_out(
    gallery: Gallery, photos: list[Photo | Any], vectors: Float, gate: QualityGate | None
) -> tuple[list[Document], list[Float | None], list[Face | None]]:
    """One result per face, faceless photo and embedding, in order; beside each the vector to search, and the face, if
    any. Raises LivenessUnavailableError."""
    results: list[Document] = []
    probes: list[Float | None] = []
    faces: list[Face | None] = []
    for i, photo in enumerate(photos):
        if isinstance(photo, KithError):
            results.append(_result(image=i, outcome="error", error=answers.problem(photo)))
            probes.append(None)
            faces.append(None)
            continue
        if not photo.faces:
            results.append(_result(image=i, outcome="no_face"))
            probes.append(None)
            faces.append(None)
        for face in photo.faces:
            quality = gate.reasons(face.quality) if gate else []
            seen = answers.face(face, gate or DEFAULT_GATE, gallery.settings.liveness_threshold)
            refusal, reasons = decide_gate(quality, verdict_of(gallery, face))
            outcome: IdentifyOutcome = refusal or "unknown"
            results.append(_result(image=i, face=seen, outcome=outcome, reasons=reasons))
            probes.append(None if refusal else face.vector)
            faces.append(face)
    for i, vector in enumerate(vectors):
        refusal, reasons = decide_gate([], verdict_of(gallery, None))
        results.append(_result(embedding=i, outcome=refusal or "unknown", reasons=reasons))
        probes.append(None if refusal else vector)
        faces.append(None)
    return results, probes, faces


def _result(**fields: Any) -> Document:
    """IdentityOut."""
    return {"candidates": [], "reasons": [], **fields}


def _as_of(gallery: Gallery, now: Gallery) -> Gallery:
    """As it was read, in the version it has now: what was written while photos were looked at is to be found, too."""
    if now.pk != gallery.pk or now.version == gallery.version:
        return gallery
    return replace(gallery, version=now.version, subjects=now.subjects, templates=now.templates)


async def _search(
    kith: Context,
    gallery: Gallery,
    probes: Float,
    target: RiskTarget,
    k: int,
    among: Keys | None,
    limited: bool = False,
) -> tuple[list[Found], dict[int, Named]]:
    """Search, and look up who the keys are; again where a subject was deleted in between.

    Raises:
        GalleryNotFoundError: the gallery was deleted in between; one of its name that was made or restored since is
            another.
        StorageDamagedError: somebody was found whom the database does not know.
        DeadlineExceededError, ClientGoneError: nobody waits any more.
    """
    while True:
        answers = await kith.pipeline.identify(gallery, probes, target, k, among, limited)
        keys = {c.subject_pk for a in answers for c in (*a.candidates, a.decision.best, a.decision.runner_up) if c}
        named = kith.store.named_at_once(gallery, keys)
        if named is None:
            named = await kith.run(kith.store.named, gallery, keys)
        if keys <= named.keys():
            return answers, named
        if (asking := patience.current()) is not None:
            asking.check()
        now = await kith.gallery(gallery.name)
        if now.pk != gallery.pk:
            # Nothing will be logged for it any more, so that its index would name those who are gone for ever.
            await kith.run(kith.followers.drop, gallery)
            raise GalleryNotFoundError(f"gallery {gallery.name!r} was replaced meanwhile by another of its name")
        if now.version == gallery.version:  # whoever deletes a subject changes it
            raise StorageDamagedError(f"templates of gallery {gallery.name!r} belong to subjects that are not there")
        gallery = _as_of(gallery, now)


def _decision(found: Found, named: dict[int, Named], target: RiskTarget) -> Document:
    """What a search adds to an IdentityOut."""
    decision, best = found.decision, found.decision.best
    who = named[best.subject_pk] if decision.outcome == "identified" and best is not None else None
    return with_values(
        outcome=decision.outcome,
        subject=who.id if who else None,
        name=who.name if who else None,
        similarity=round(best.similarity, 4) if best else None,
        threshold=round(found.thresholds.accept, 4),
        review_threshold=round(found.thresholds.review, 4),
        runner_up=_candidate(decision.runner_up, named) if decision.runner_up else None,
        margin=round(decision.margin, 4) if decision.margin is not None else None,
        false_alarm_probability=best.false_alarm_probability if best else None,
        risk=answers.risk(target, found.thresholds),
        reasons=["risk_out_of_reach"] if found.thresholds.out_of_reach else [],
        candidates=[_candidate(candidate, named) for candidate in found.candidates],
    )


def _candidate(candidate: Candidate, named: dict[int, Named]) -> Document:
    """CandidateOut."""
    subject = named[candidate.subject_pk]
    return with_values(
        subject=subject.id,
        name=subject.name,
        similarity=round(candidate.similarity, 4),
        false_alarm_probability=candidate.false_alarm_probability,
    )

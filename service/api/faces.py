"""Detect, embed, verify: what needs no gallery."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
from fastapi import APIRouter, Request

from models.network import Float
from models.quality import QualityGate
from service.api.context import Context, Kith
from service.api.openapi import PROBLEMS, body_of
from service.api.problems import problem
from service.api.requests import read_photos, read_verify
from service.api.schemas import (
    DetectIn,
    EmbedIn,
    FaceOut,
    FacesOut,
    PhotoOut,
    QualityOut,
    RiskOut,
    Side,
    SideOut,
    VerifyIn,
    VerifyOut,
)
from service.decision import RiskTarget, Thresholds, decide_pair, false_alarm_probability, thresholds_for
from service.enrolment import check_recogniser, check_vectors
from service.errors import ImageError, InvalidRequestError, KithError, RecogniserMismatchError
from service.gallery.subjects import Gallery
from service.pipeline import Face, Photo
from service.recognisers import Served

router = APIRouter(tags=["faces"], responses=PROBLEMS)
DEFAULT_GATE = QualityGate()


@router.post("/v1/detect", response_model_exclude_none=True, openapi_extra=body_of(DetectIn))
async def detect(request: Request, kith: Kith) -> FacesOut:
    """Find the faces of one or many photos: boxes, five landmarks, scores, quality."""
    body = await read_photos(request, DetectIn, kith.settings)
    return FacesOut(
        model=kith.recognisers.default.pack.model_id, images=await each_photo(body.images, kith.pipeline.detect)
    )


@router.post("/v1/embed", response_model_exclude_none=True, openapi_extra=body_of(EmbedIn))
async def embed(request: Request, kith: Kith) -> FacesOut:
    """Find the faces of one or many photos and give each its embedding, a unit vector."""
    body = await read_photos(request, EmbedIn, kith.settings)
    by = kith.recognisers.named(body.model)
    images = await each_photo(body.images, lambda payload: kith.pipeline.embed(payload, by))
    return FacesOut(model=by.pack.model_id, recogniser=by.fingerprint, images=images)


async def each_photo(images: list[bytes], stage: Callable[[bytes], Awaitable[Photo]]) -> list[PhotoOut]:
    """Put every photo through ``stage``; one bad photo of several fails alone, a lone one fails the call."""
    results = await gather_photos(images, stage)
    return [
        PhotoOut(error=problem(r))
        if isinstance(r, KithError)
        else PhotoOut(width=r.width, height=r.height, faces=[face_out(face) for face in r.faces])
        for r in results
    ]


async def gather_photos(images: list[bytes], stage: Callable[[bytes], Awaitable[Photo]]) -> list[Photo | ImageError]:
    """Raises InvalidRequestError without photos, and a lone photo's own error."""
    if not images:
        raise InvalidRequestError("images: at least one photo is needed")

    async def guarded(payload: bytes) -> Photo | ImageError:
        try:
            return await stage(payload)
        except ImageError as error:
            return error

    tasks = [asyncio.create_task(guarded(payload)) for payload in images]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # where one fails all, nobody wants the others
            task.cancel()
    if len(results) == 1 and isinstance(results[0], ImageError):
        raise results[0]
    return results


def face_out(face: Face, gate: QualityGate = DEFAULT_GATE) -> FaceOut:
    reasons = gate.reasons(face.quality)
    return FaceOut(
        box=rounded(face.box_xyxy, 1),
        landmarks=[rounded(point, 1) for point in face.landmarks_xy],
        score=round(face.score, 4),
        quality=QualityOut(**face.quality.as_dict(), usable=not reasons, reasons=reasons),
        embedding=None if face.vector is None else [float(v) for v in face.vector],
    )


def without_vector(face: FaceOut) -> FaceOut:
    return face.model_copy(update={"embedding": None})


def rounded(values: Float, digits: int) -> list[float]:
    return [round(float(v), digits) for v in values]


def risk_out(target: RiskTarget, thresholds: Thresholds) -> RiskOut:
    return RiskOut(**{target.kind: target.value}, source=thresholds.source, extrapolated=thresholds.extrapolated)


@router.post("/v1/verify", response_model_exclude_none=True, openapi_extra=body_of(VerifyIn, ("a", "b")))
async def verify(request: Request, kith: Kith) -> VerifyOut:
    """Are these two the same person? Each side is a photo (its largest face), an embedding, or an enrolled subject."""
    body = await read_verify(request, kith.settings)
    galleries = {
        side.subject.gallery: await kith.gallery(side.subject.gallery) for side in (body.a, body.b) if side.subject
    }
    by = _recogniser(kith, body, list(galleries.values()))
    sides = await asyncio.gather(*(_side(kith, side, by, galleries) for side in (body.a, body.b)))
    (vectors_a, out_a, reasons_a), (vectors_b, out_b, reasons_b) = sides
    reasons = [f"{name}: {r}" for name, side in (("a", reasons_a), ("b", reasons_b)) for r in side]
    if vectors_a is None or vectors_b is None:
        return VerifyOut(model=by.pack.model_id, outcome="no_face", reasons=reasons, a=out_a, b=out_b)
    target = body.risk.target("fmr")
    # Every template of one side meets every template of the other, and the best counts: for the two people together
    # to be within the asked rate, each comparison must be far below it.
    comparisons = len(vectors_a) * len(vectors_b)
    joint = RiskTarget("fpir", target.value) if target.kind == "fmr" else target
    of_pack = kith.pipeline.risks.of_pack(by.fingerprint)
    thresholds = thresholds_for(joint, of_pack, comparisons)
    outcome_known = not reasons
    if thresholds.out_of_reach:
        reasons.append("risk_out_of_reach")
    similarity = float(np.clip(vectors_a @ vectors_b.T, -1, 1).max())
    return VerifyOut(
        model=by.pack.model_id,
        outcome=decide_pair(similarity, thresholds) if outcome_known else "rejected_quality",
        similarity=round(similarity, 4),
        threshold=round(thresholds.accept, 4),
        review_threshold=round(thresholds.review, 4),
        false_match_probability=false_alarm_probability(similarity, of_pack, comparisons),
        risk=risk_out(target, thresholds),
        reasons=reasons,
        a=out_a,
        b=out_b,
    )


def _recogniser(kith: Context, body: VerifyIn, galleries: list[Gallery]) -> Served:
    """By whose vectors the sides are compared: that asked for, else of the subjects' galleries, else the default.

    Raises:
        ModelNotServedError: it is not served.
        RecogniserMismatchError: a subject or an embedding is another one's, or nobody says whose an embedding is that
            is compared with a subject of a gallery that has, or had, vectors of two.
    """
    if body.model is not None or not galleries:
        by = kith.recognisers.named(body.model)
    else:
        by = kith.recognisers.of(galleries[0])
    for gallery in galleries:
        check_recogniser(gallery, by.fingerprint)
        for side in (body.a, body.b):
            if side.embedding is not None and body.model is None:
                check_recogniser(gallery, side.recogniser)
    for side in (body.a, body.b):
        if side.recogniser not in (None, by.fingerprint):
            raise RecogniserMismatchError(
                f"an embedding of {side.recogniser[:12]} is not compared by {by.fingerprint[:12]}"
            )
    return by


async def _side(
    kith: Context, side: Side, by: Served, galleries: dict[str, Gallery]
) -> tuple[Float | None, SideOut, list[str]]:
    """One side's vectors (n, d), None without a face; what was seen; and why it should not be trusted."""
    if side.embedding is not None:
        return check_vectors([side.embedding], by.dimension), SideOut(), []
    if side.subject is not None:
        gallery = galleries[side.subject.gallery]
        vectors, _ = await kith.run(kith.store.subject_vectors, gallery, side.subject.subject)
        if not len(vectors):
            raise InvalidRequestError(f"subject {side.subject.subject!r} has no template")
        return vectors, SideOut(), []
    photo = await kith.pipeline.embed(side.image or b"", by)
    if not photo.faces:
        return None, SideOut(faces_found=0), ["no_face"]
    face = photo.largest()
    assert face.vector is not None  # noqa: S101 - embed gives every face one
    seen = SideOut(face=without_vector(face_out(face)), faces_found=len(photo.faces))
    return face.vector[None], seen, DEFAULT_GATE.reasons(face.quality)

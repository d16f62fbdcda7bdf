"""Detect, embed, verify: what needs no gallery."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, get_args

import numpy as np
from fastapi import APIRouter, Request, Response

from models.gate import Verdict
from models.network import Float
from service.api import answers
from service.api.answers import DEFAULT_GATE, Document, answer, with_values
from service.api.context import Context, Kith
from service.api.openapi import PROBLEMS, body_of
from service.api.permissions import Permitted, caller_of
from service.api.requests import read_photos, read_verify
from service.api.schemas import DetectIn, EmbedIn, FacesOut, Side, VerifyIn, VerifyOut
from service.decision import Refusal, RiskTarget, decide_pair, false_alarm_probability, gate, thresholds_for
from service.enrolment import check_recogniser, check_vectors
from service.errors import ImageError, InvalidRequestError, LivenessUnavailableError, RecogniserMismatchError
from service.gallery.subjects import Gallery
from service.pipeline import Photo
from service.recognisers import Served

router = APIRouter(route_class=Permitted, tags=["faces"], responses=PROBLEMS)
Result = TypeVar("Result")


@router.post("/v1/detect", response_model=FacesOut, openapi_extra=body_of(DetectIn))
async def detect(request: Request, kith: Kith) -> Response:
    """Find the faces of one or many photos: boxes, five landmarks, scores, quality."""
    with kith.measures.stage("read"):
        body = await read_photos(request, DetectIn, kith.settings)
    seen = await gather_photos(kith, body.photos, kith.pipeline.detect)
    return answer({"model": kith.recognisers.default.pack.model_id, "images": [answers.photo(one) for one in seen]})


@router.post("/v1/embed", response_model=FacesOut, openapi_extra=body_of(EmbedIn))
async def embed(request: Request, kith: Kith) -> Response:
    """Find the faces of one or many photos and give each its embedding, a unit vector."""
    with kith.measures.stage("read"):
        body = await read_photos(request, EmbedIn, kith.settings)
    by = kith.recognisers.named(body.model)
    seen = await gather_photos(kith, body.photos, lambda payload: kith.pipeline.embed(payload, by))
    images = [answers.photo(one) for one in seen]
    return answer({"model": by.pack.model_id, "recogniser": by.fingerprint, "images": images})


async def gather_photos(
    kith: Context, photos: list[bytes | str], stage: Callable[[bytes], Awaitable[Photo]]
) -> list[Photo | ImageError]:
    """Put every photo through ``stage``, fetched where it is a URL; one bad photo of several fails alone, a lone one
    fails the call.

    Raises InvalidRequestError without photos, and a lone photo's own error.
    """
    if not photos:
        raise InvalidRequestError("images, urls: at least one photo is needed")

    async def at_hand(photo: bytes | str) -> Photo:
        return await stage(photo if isinstance(photo, bytes) else await _fetched(kith, photo))

    if len(photos) == 1:
        return [await at_hand(photos[0])]

    async def guarded(photo: bytes | str) -> Photo | ImageError:
        try:
            return await at_hand(photo)
        except ImageError as error:
            return error

    return await _together([guarded(photo) for photo in photos])


async def _fetched(kith: Context, url: str) -> bytes:
    with kith.measures.stage("fetch"):
        return await kith.fetcher.fetch(url)


async def _together(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results, in order, or the first error."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # where one fails all, nobody wants the others
            task.cancel()


@router.post("/v1/verify", response_model=VerifyOut, openapi_extra=body_of(VerifyIn, ("a", "b")))
async def verify(request: Request, kith: Kith) -> Response:
    """Are these two the same person? Each side is a photo (its largest face), an embedding, or an enrolled subject."""
    with kith.measures.stage("read"):
        body = await read_verify(request, kith.settings)
    names = [side.subject.gallery for side in (body.a, body.b) if side.subject]
    for name in names:
        caller_of(request).check_gallery(name)
    galleries = {name: await kith.gallery(name) for name in names}
    by = _recogniser(kith, body, list(galleries.values()))
    live_from = _live_from(kith, body, list(galleries.values()))
    sides = await _together([_side(kith, side, by, galleries, live_from) for side in (body.a, body.b)])
    (vectors_a, out_a, quality_a, live_a), (vectors_b, out_b, quality_b, live_b) = sides
    refusals = {"a": gate(quality_a, live_a), "b": gate(quality_b, live_b)}
    reasons = [f"{name}: {reason}" for name, (_, found) in refusals.items() for reason in found]
    if vectors_a is None or vectors_b is None:
        await _write_down(kith, body, galleries, "no_face")
        return answer({"model": by.pack.model_id, "outcome": "no_face", "reasons": reasons, "a": out_a, "b": out_b})
    target = body.risk.target("fmr")
    # Every template of one side meets every template of the other, and the best counts: for the two people together
    # to be within the asked rate, each comparison must be far below it.
    comparisons = len(vectors_a) * len(vectors_b)
    joint = RiskTarget("fpir", target.value) if target.kind == "fmr" else target
    of_pack = kith.pipeline.risks.of_pack(by.fingerprint)
    thresholds = thresholds_for(joint, of_pack, comparisons)
    refused = {refusal for refusal, _ in refusals.values()}
    if thresholds.out_of_reach:
        reasons.append("risk_out_of_reach")
    similarity = float(np.clip(vectors_a @ vectors_b.T, -1, 1).max())
    first = next((each for each in get_args(Refusal) if each in refused), None)
    outcome = first or decide_pair(similarity, thresholds)
    await _write_down(kith, body, galleries, outcome)
    return answer(
        with_values(
            model=by.pack.model_id,
            outcome=outcome,
            similarity=round(similarity, 4),
            threshold=round(thresholds.accept, 4),
            review_threshold=round(thresholds.review, 4),
            false_match_probability=false_alarm_probability(similarity, of_pack, comparisons),
            risk=answers.risk(target, thresholds),
            reasons=reasons,
            a=out_a,
            b=out_b,
        )
    )


async def _write_down(kith: Context, body: VerifyIn, galleries: dict[str, Gallery], outcome: str) -> None:
    """Who was asked after, and how it ended."""
    kith.measures.verified.add(outcome)
    for side in (body.a, body.b):
        if side.subject:
            await kith.audit.verified(galleries[side.subject.gallery], side.subject.subject, outcome)


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


def _live_from(kith: Context, body: VerifyIn, galleries: list[Gallery]) -> float | None:
    """The least score of a live face; None: nobody asks. A request may ask for more than the galleries, not for less.

    Raises LivenessUnavailableError: somebody asks, and no model here can tell.
    """
    asking = [gallery.settings for gallery in galleries if gallery.settings.liveness == "required"]
    if not asking and not body.require_liveness:
        return None
    if kith.pipeline.judge is None:
        raise LivenessUnavailableError("liveness is required, and the pack that is served has no model that tells it")
    own = kith.pipeline.judge.spec.threshold
    wanted = [own if each.liveness_threshold is None else each.liveness_threshold for each in asking]
    return max(wanted, default=own)


async def _side(
    kith: Context, side: Side, by: Served, galleries: dict[str, Gallery], live_from: float | None
) -> tuple[Float | None, Document, list[str], Verdict | None]:
    """One side's vectors (n, d), None without a face; what was seen; which values are out of bounds; and whether a
    person was there, where somebody asks (``live_from``)."""
    if side.embedding is not None:
        return check_vectors([side.embedding], by.dimension), {}, [], None if live_from is None else "not_judged"
    if side.subject is not None:
        gallery = galleries[side.subject.gallery]
        vectors, _ = await kith.run(kith.store.subject_vectors, gallery, side.subject.subject)
        if not len(vectors):
            raise InvalidRequestError(f"subject {side.subject.subject!r} has no template")
        return vectors, {}, [], None
    payload = side.image or b"" if side.url is None else await _fetched(kith, side.url)
    photo = await kith.pipeline.embed(payload, by)
    if not photo.faces:
        return None, {"faces_found": 0}, ["no_face"], None
    face = photo.largest()
    assert face.vector is not None  # noqa: S101 - embed gives every face one
    seen = {"face": answers.face(face, live_from=live_from), "faces_found": len(photo.faces)}
    verdict: Verdict | None = None
    if live_from is not None:
        verdict = "not_judged" if face.liveness is None else face.liveness.verdict(live_from)
    return face.vector[None], seen, DEFAULT_GATE.reasons(face.quality), verdict

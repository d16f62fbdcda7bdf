"""Verify: two photos, embeddings or subjects, the same person or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from fastapi import APIRouter, Request, Response

from models.gate import QualityGate, Verdict
from models.network import Float
from service.api import answers
from service.api.answers import DEFAULT_GATE, Document, answer, with_values
from service.api.context import Context, Kith
from service.api.openapi import PROBLEMS, body_of
from service.api.permissions import Caller, Permitted, caller_of
from service.api.photos import fetched, together
from service.api.probes import NEAR_MISS_COST, PHOTO_NEAR_MISS_COST
from service.api.requests import read_verify
from service.api.schemas import RiskIn, Side, VerifyIn, VerifyOut
from service.decision import (
    Refusal,
    RiskTarget,
    decide_pair,
    false_alarm_probability,
    gate,
    lowest_review,
    thresholds_for,
)
from service.errors import InvalidRequestError, LivenessUnavailableError, RecogniserMismatchError
from service.gallery.subjects import Gallery
from service.recognisers import Served, check_recogniser, check_vectors
from service.verification import Enrolled, compare

router = APIRouter(route_class=Permitted, tags=["faces"], responses=PROBLEMS)


@dataclass(frozen=True, eq=False)
class Asked:
    """One side. ``person``: a face's (d,) vector, a subject, or None where a photo shows no face; ``seen``: SideOut;
    ``live``: whether a person was there, where somebody asks."""

    person: Float | Enrolled | None
    seen: Document = field(default_factory=dict)
    poor: list[str] = field(default_factory=list)
    live: Verdict | None = None


@router.post("/v1/verify", response_model=VerifyOut, openapi_extra=body_of(VerifyIn, ("a", "b")))
async def verify(request: Request, kith: Kith) -> Response:
    """Are these two the same person? Each side is a photo (its largest face), an embedding, or an enrolled subject.

    Of a comparison with a subject, without the scope admin, the similarity is coarse, or left out below the review
    threshold, and no threshold is lower than the review threshold of the gallery's own risk.
    """
    with kith.measures.stage("read"):
        body = await read_verify(request, kith.settings, kith.recognisers.largest_dimension)
    caller = caller_of(request)
    names = [side.subject.gallery for side in (body.a, body.b) if side.subject]
    for name in names:
        caller.check_gallery(name)
    galleries = {name: await kith.gallery(name) for name in names}
    # An enrolled embedding is a probe as well. Photos cannot be chosen as freely, but thresholds can.
    photo = any(_is_photo(side) for side in (body.a, body.b))
    cost = PHOTO_NEAR_MISS_COST if photo else NEAR_MISS_COST
    chosen = body.risk is not None and not caller.may_export
    probed = galleries[names[0]] if names and (chosen or not photo) else None
    async with kith.probes.taken(caller, probed, 1, cost):
        return await _verify(kith, body, caller, galleries, probed, cost)


async def _verify(
    kith: Context, body: VerifyIn, caller: Caller, galleries: dict[str, Gallery], probed: Gallery | None, cost: int
) -> Response:
    by = _recogniser(kith, body, list(galleries.values()))
    live_from = _live_from(kith, body, list(galleries.values()))
    a, b = await together([_side(kith, side, by, galleries, live_from) for side in (body.a, body.b)])
    refusals = {"a": gate(a.poor, a.live), "b": gate(b.poor, b.live)}
    reasons = [f"{name}: {reason}" for name, (_, found) in refusals.items() for reason in found]
    if a.person is None or b.person is None:
        await _write_down(kith, body, galleries, "no_face")
        return answer({"model": by.pack.model_id, "outcome": "no_face", "reasons": reasons, "a": a.seen, "b": b.seen})
    compared = compare(a.person, b.person, kith.pipeline.risks.of_pack(by.fingerprint))
    target = _target(body.risk, body, galleries)
    joint = _joint(target)
    thresholds = thresholds_for(joint, compared.known, compared.comparisons, compared.review_factor)
    similarity: float | None = compared.similarity
    near_miss = False
    if galleries:
        usual = _joint(_target(None, body, galleries))
        floor = lowest_review(usual, compared.known, compared.comparisons, compared.review_factor)
        if not caller.may_export:
            thresholds = thresholds.at_least(floor)
            similarity = thresholds.coarse(compared.similarity, photo=cost == PHOTO_NEAR_MISS_COST)
        near_miss = floor <= compared.similarity < thresholds.accept
    refused = {refusal for refusal, _ in refusals.values()}
    if thresholds.out_of_reach:
        reasons.append("risk_out_of_reach")
    first = next((each for each in get_args(Refusal) if each in refused), None)
    outcome = first or decide_pair(compared.similarity, thresholds)
    if probed is not None:
        await kith.probes.settle(caller, probed, int(near_miss), cost)
    await _write_down(kith, body, galleries, outcome)
    chance = None if similarity is None else false_alarm_probability(similarity, compared.known, compared.comparisons)
    return answer(
        with_values(
            model=by.pack.model_id,
            outcome=outcome,
            similarity=None if similarity is None else round(similarity, 4),
            threshold=round(thresholds.accept, 4),
            review_threshold=round(thresholds.review, 4),
            false_match_probability=chance,
            risk=answers.risk(target, thresholds),
            reasons=reasons,
            a=a.seen,
            b=b.seen,
        )
    )


async def _write_down(kith: Context, body: VerifyIn, galleries: dict[str, Gallery], outcome: str) -> None:
    """Who was asked after, and how it ended."""
    kith.measures.verified.add(outcome)
    for side in (body.a, body.b):
        if side.subject:
            await kith.audit.verified(galleries[side.subject.gallery], side.subject.subject, outcome)


def _is_photo(side: Side) -> bool:
    return side.embedding is None and side.subject is None


def _joint(target: RiskTarget) -> RiskTarget:
    """For two people together to be within the asked rate, each of several comparisons must be far below it."""
    return RiskTarget("fpir", target.value) if target.kind == "fmr" else target


def _target(asked: RiskIn | None, body: VerifyIn, galleries: dict[str, Gallery]) -> RiskTarget:
    """What is asked; else what the gallery of the one subject says of one comparison: an FPIR is of a search."""
    if asked is not None:
        return asked.target("fmr")
    subjects = [side.subject for side in (body.a, body.b) if side.subject]
    if len(subjects) == 1 and (own := galleries[subjects[0].gallery].settings.risk).kind != "fpir":
        return own
    return RiskIn(preset="standard").target("fmr")


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


async def _side(kith: Context, side: Side, by: Served, galleries: dict[str, Gallery], live_from: float | None) -> Asked:
    """``live_from``: the least score of a live face; None: nobody asks."""
    if side.embedding is not None:
        (vector,) = check_vectors([side.embedding], by.dimension)
        return Asked(vector, live=None if live_from is None else "not_judged")
    if side.subject is not None:
        gallery = galleries[side.subject.gallery]
        return Asked(await kith.run(_enrolled, kith, gallery, side.subject.subject))
    payload = side.image or b"" if side.url is None else await fetched(kith, side.url)
    photo = await kith.pipeline.embed(payload, by)
    if not photo.faces:
        return Asked(None, {"faces_found": 0}, ["no_face"])
    face = photo.largest()
    assert face.vector is not None  # noqa: S101 - embed gives every face one
    bounds = _bounds(list(galleries.values()))
    seen = {"face": answers.face(face, bounds, live_from), "faces_found": len(photo.faces)}
    live: Verdict | None = None
    if live_from is not None:
        live = "not_judged" if face.liveness is None else face.liveness.verdict(live_from)
    return Asked(face.vector, seen, bounds.reasons(face.quality), live)


def _bounds(galleries: list[Gallery]) -> QualityGate:
    """Of a photo's quality: those of the gallery whose subject it is compared with."""
    return galleries[0].settings.quality_gate if galleries else DEFAULT_GATE


def _enrolled(kith: Context, gallery: Gallery, subject_id: str) -> Enrolled:
    """Raises SubjectNotFoundError, InvalidRequestError of a subject without templates."""
    vectors, qualities = kith.store.subject_vectors(gallery, subject_id)
    if not len(vectors):
        raise InvalidRequestError(f"subject {subject_id!r} has no template")
    known, settings = kith.pipeline.risks.of(gallery), gallery.settings
    return Enrolled(vectors, qualities, settings.fusion, known, settings.review_factor)

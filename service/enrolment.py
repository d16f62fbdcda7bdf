"""Enrolment: a photo or a vector becomes a template, or is refused with the reason."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from models.network import Float
from service.decision import FaceChoice, RiskTarget, thresholds_for
from service.errors import (
    DuplicateSubjectError,
    InconsistentTemplateError,
    LowQualityError,
    NoFaceError,
    NotLiveError,
    SeveralFacesError,
    SubjectNotFoundError,
)
from service.gallery.faiss_index import products
from service.gallery.follower import Followers
from service.gallery.fusion import scores
from service.gallery.store import Store
from service.gallery.subjects import Gallery, NewTemplate
from service.liveness import verdict_of
from service.pipeline import Face, Photo, Pipeline
from service.recognisers import Recognisers

DUPLICATE_RISK: Final = RiskTarget("fpir", 0.001)
"""A newcomer is taken for an enrolled person at most this often, whatever risk the gallery answers with."""
MAX_FALSE_INCONSISTENT: Final = 0.05
"""Of true pairs, the share that may be refused as inconsistent; a recogniser with a lower EER refuses fewer."""


@dataclass(frozen=True)
class Overrides:
    allow_duplicate: bool = False
    allow_inconsistent: bool = False
    allow_low_quality: bool = False
    allow_not_live: bool = False


async def embed_for(
    gallery: Gallery, payload: bytes, pipeline: Pipeline, recognisers: Recognisers, background: bool = False
) -> Photo:
    """Decode a photo that is to be enrolled and give its faces vectors by the gallery's recogniser; the largest one, by
    that of its other generation too, if there is one and it is served, and the crop that the gallery keeps.
    ``background``: behind the requests.

    Raises:
        ImageError.
        RecogniserMismatchError: the gallery's recogniser is not served.
    """
    other = None if gallery.other is None else recognisers.get(gallery.other.fingerprint)
    keep = gallery.settings.keep_crops
    photo = await pipeline.embed(payload, recognisers.of(gallery), other, keep=keep, background=background)
    if gallery.other is not None and other is not None and photo.faces:
        row, largest = photo.largest_row(), photo.largest()
        assert largest.other_crop is not None  # noqa: S101 - it was asked for
        (seen,) = await other.batcher.submit([largest.other_crop], background)
        photo.faces[row] = replace(largest, others={gallery.other.number: seen})
    return photo


def choose_face(photo: Photo, choice: FaceChoice) -> Face:
    """Raises NoFaceError, SeveralFacesError."""
    if not photo.faces:
        raise NoFaceError("no face was found in the photo")
    if choice == "only" and len(photo.faces) > 1:
        raise SeveralFacesError(f"the photo shows {len(photo.faces)} faces")
    return photo.largest()


def template_from_face(
    face: Face, gallery: Gallery, overrides: Overrides, template_id: str | None = None
) -> NewTemplate:
    """Raises LowQualityError, NotLiveError, LivenessUnavailableError."""
    reasons = gallery.settings.quality_gate.reasons(face.quality)
    if reasons and not overrides.allow_low_quality:
        raise LowQualityError(f"out of bounds: {', '.join(reasons)}", reasons=reasons, quality=face.quality.as_dict())
    if not overrides.allow_not_live and (verdict := verdict_of(gallery, face)) not in (None, "live"):
        score = None if face.liveness is None else face.liveness.score
        raise NotLiveError(
            "too little of the photo surrounds the face to tell whether a person was there"
            if score is None
            else "the face looks like a picture of a face",
            liveness={"verdict": verdict} | ({} if score is None else {"score": round(score, 4)}),
        )
    assert face.vector is not None  # noqa: S101 - faces come from Pipeline.embed
    return NewTemplate(
        template_id or uuid.uuid4().hex,
        face.vector,
        "photo",
        face.quality.as_dict(),
        face.score,
        face.others,
        face.kept,
    )


def new_template(vector: Float, gallery: Gallery, overrides: Overrides) -> NewTemplate:
    """A template from a given (d,) unit vector. Raises NotLiveError: the gallery asks for people, not for numbers."""
    if not overrides.allow_not_live and verdict_of(gallery, None) is not None:
        raise NotLiveError("an embedding does not show that a person was there")
    return NewTemplate(uuid.uuid4().hex, vector, "embedding")


def check_identity(
    template: NewTemplate,
    siblings: list[NewTemplate],
    gallery: Gallery,
    subject_id: str,
    store: Store,
    followers: Followers,
    pipeline: Pipeline,
    overrides: Overrides,
) -> None:
    """Refuse a face that belongs to somebody else, or that is unlike its own subject: the templates it has, and those
    about to be enrolled with it (``siblings``). Needs a calibrated pack.

    Raises:
        DuplicateSubjectError, InconsistentTemplateError.
    """
    calibration = pipeline.risks.calibration(gallery)
    if calibration is None:
        return
    try:
        own, qualities = store.subject_vectors(gallery, subject_id)
        own_pk = store.subject(gallery, subject_id).pk
    except SubjectNotFoundError:
        own, qualities, own_pk = np.empty((0, gallery.dimension), np.float32), np.empty(0, np.float32), -1
    if siblings:
        own = np.concatenate([own, [sibling.vector for sibling in siblings]])
        qualities = np.append(qualities, np.array([(s.quality or {}).get("score", np.nan) for s in siblings]))
    own_best = float(products(template.vector[None], own).max()) if len(own) else None
    if not overrides.allow_duplicate:
        (hits,), comparisons = followers.of(gallery).search(template.vector[None], 2)
        others = [hit for hit in hits if hit.subject_pk != own_pk]
        threshold = thresholds_for(DUPLICATE_RISK, pipeline.risks.of(gallery), comparisons).accept
        one = np.zeros(len(own), np.int64)
        itself = scores(template.vector[None], own, one, qualities, gallery.settings.fusion).max(initial=-1.0)
        # Someone else must be nearer than the subject itself: lookalikes may both be enrolled.
        alike = [hit for hit in others if hit.similarity >= max(threshold, float(itself))]
        named = store.subjects_by_pk(gallery, [hit.subject_pk for hit in alike]) if alike else {}
        for hit in alike:
            # The subject itself may be there since it was looked up, made by a request beside this one.
            if (other := named.get(hit.subject_pk)) is not None and other.id != subject_id:
                raise DuplicateSubjectError(
                    f"the face resembles subject {other.id!r}",
                    subject=other.id,
                    similarity=round(hit.similarity, 4),
                    threshold=round(threshold, 4),
                )
    if own_best is not None and not overrides.allow_inconsistent:
        threshold = min(calibration.equal_error_threshold(), calibration.threshold_at_fnmr(MAX_FALSE_INCONSISTENT))
        if own_best < threshold:
            raise InconsistentTemplateError(
                f"the face is unlike the {len(own)} templates of subject {subject_id!r}",
                similarity=round(own_best, 4),
                threshold=round(threshold, 4),
            )

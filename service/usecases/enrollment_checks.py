"""Enrollment: checks that turn a photo or an embedding into a template."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import numpy as np

from kith.wire.common import FaceChoice
from kith.wire.subjects import ChecksIn, DecoyIn, EnrollIn
from models.risk.calibration import Calibration
from models.runtime.network import Float
from models.vision.face_search import Detail
from models.vision.quality import QualityGate
from service.core.errors import (
    DuplicateSubjectError,
    GalleryMovedError,
    ImageError,
    InconsistentTemplateError,
    KithError,
    SubjectNotFoundError,
)
from service.domain.fusion import fuse_similarities
from service.domain.gallery import Gallery, Hit, NewTemplate
from service.domain.outcomes import RiskTarget
from service.index.faiss_structures import products
from service.inference.photo_pipeline import Face, KeptCrops, Photo, verdict_of
from service.risk.decision import score_candidates
from service.risk.gallery_risks import GalleryRisks
from service.risk.search import depth_of
from service.risk.threshold import ImpostorRisk, thresholds_for
from service.security.api_keys import Caller
from service.storage.repositories.store import Store
from service.usecases.backend import Backend

Key = TypeVar("Key")
Result = TypeVar("Result")
DUPLICATE_RISK: Final = RiskTarget("fpir", 0.001)
"""Maximum rate of new people mistaken for an enrolled subject, independent of the gallery's risk."""
MAX_FALSE_INCONSISTENT: Final = 0.05
"""Maximum share of true pairs rejected as inconsistent. The EER applies if it is lower."""


async def enroll_on(
    backend: Backend,
    snapshot: Gallery,
    caller: Caller,
    body: EnrollIn | DecoyIn,
    enroll: Callable[[Gallery], Awaitable[Result]],
) -> Result:
    """Enroll the photos and embeddings of ``body``, again if the gallery moves to another recognizer meanwhile.

    Raises ForbiddenError: embeddings, without the scope vectors.
    """
    if body.embeddings:
        caller.check_vectors("embeddings")
    gallery = await backend.reload_gallery(snapshot)
    if body.embeddings and body.recognizer is None and not gallery.moved:
        body.recognizer = gallery.fingerprint  # the embeddings stay this recognizer's if the gallery moves now
    while True:
        try:
            return await enroll(gallery)
        except GalleryMovedError:
            gallery = await backend.reload_gallery(gallery)


async def embed_for(
    backend: Backend, gallery: Gallery, photo: bytes | str, detail: Detail | None, background: bool = False
) -> Photo:
    """Embed the faces of a photo, given as bytes or a URL, for enrollment.

    The main face also gets the crop to store. ``background``: yield to requests.

    Raises:
        ImageError: the photo cannot be decoded.
        RecognizerMismatchError: the gallery's recognizer is not served.
    """
    keep: KeptCrops = gallery.settings.quality_gate if gallery.settings.keep_crops else "none"
    served = backend.recognizers.for_gallery(gallery)
    detail = detail or backend.settings.expected_face_detail
    return await backend.photos.embed(photo, served, detail, keep=keep, background=background)


def choose_face(photo: Photo, choice: FaceChoice, gate: QualityGate) -> Face:
    """Return the face to enroll: the main face. Raises no_face, and several_faces if another one rivals it."""
    if not photo.faces:
        raise ImageError("no_face", "no face was found in the photo")
    row, rivaled = photo.main_face(gate)
    if choice == "only" and rivaled:
        raise ImageError("several_faces", f"the photo shows {photo.face_count} faces, and none is clearly the largest")
    return photo.faces[row]


def template_from_face(
    face: Face, gallery: Gallery, overrides: ChecksIn, template_id: str | None = None
) -> NewTemplate:
    """Return a template of a face. Raises low_quality, not_live, liveness_unavailable."""
    reasons = gallery.settings.quality_gate.reasons(face.quality)
    if reasons and not overrides.allow_low_quality:
        raise ImageError(
            "low_quality", f"out of bounds: {', '.join(reasons)}", reasons=reasons, quality=face.quality.as_dict()
        )
    if not overrides.allow_not_live and (verdict := verdict_of(gallery, face)) not in (None, "live"):
        score = None if face.liveness is None else face.liveness.score
        judged = {"verdict": verdict} | ({} if score is None else {"score": round(score, 4)})
        raise ImageError("not_live", f"the liveness check says {verdict}", liveness=judged)
    assert face.vector is not None  # noqa: S101 - embed_for sets the vector of every face
    return NewTemplate(
        template_id or uuid.uuid4().hex,
        face.vector,
        "photo",
        face.quality.as_dict(),
        face.score,
        face.kept,
    )


def new_template(vector: Float, gallery: Gallery, overrides: ChecksIn) -> NewTemplate:
    """Return a template of a (d,) unit vector. Raises not_live if the gallery requires liveness."""
    if not overrides.allow_not_live and verdict_of(gallery, None) is not None:
        raise ImageError("not_live", "liveness cannot be checked for an embedding")
    return NewTemplate(uuid.uuid4().hex, vector, "embedding")


def needs_identity_check(gallery: Gallery, risks: GalleryRisks, overrides: ChecksIn) -> bool:
    """Return whether templates are compared with the gallery before they are stored."""
    skipped = overrides.allow_duplicate and overrides.allow_inconsistent
    return not skipped and risks.calibration(gallery) is not None


async def refuse_identities(
    templates: dict[Key, NewTemplate],
    gallery: Gallery,
    subject_id: str,
    backend: Backend,
    overrides: ChecksIn,
    run: Callable[[Callable[[], list[KithError | None]]], Awaitable[list[KithError | None]]],
) -> dict[Key, KithError]:
    """Remove the templates that `check_identities` refuses, and return why. ``run``: calls it in a thread."""
    if not overrides.allow_duplicate:
        await backend.search.catch_up(gallery)  # the duplicate check searches the index
    with backend.metrics.stage("check"):
        found = await run(partial(check_identities, list(templates.values()), gallery, subject_id, backend, overrides))
    refused = {key: each for key, each in zip(templates, found, strict=True) if each is not None}
    for key in refused:
        del templates[key]
    return refused


def check_identities(
    templates: Sequence[NewTemplate],
    gallery: Gallery,
    subject_id: str,
    backend: Backend,
    overrides: ChecksIn,
) -> list[KithError | None]:
    """Check that faces do not match another subject, and match their own. Needs a calibrated pack.

    Returns:
        None for each face that is accepted; the faces after it must match it too. Otherwise a DuplicateSubjectError, if
        another subject is more similar than the subject itself, or an InconsistentTemplateError, if the face is too
        unlike the subject's templates.
    """
    store, calibration = backend.store, backend.risks.calibration(gallery)
    if calibration is None or not templates:
        return [None] * len(templates)
    try:
        own, qualities = store.templates.vectors(gallery, subject_id)
        own_pk = store.subjects.get(gallery, subject_id).pk
    except SubjectNotFoundError:
        own, qualities, own_pk = np.empty((0, gallery.dimension), np.float32), np.empty(0, np.float32), -1
    faces = np.stack([template.vector for template in templates])
    hits_of: Sequence[Sequence[Hit]] = [()] * len(faces)
    subjects = 0
    if not overrides.allow_duplicate:
        hits_of, found = backend.followers.catch_up_blocking(gallery).search(faces, depth_of(gallery))
        subjects = found - len(gallery.outsiders)
    model = backend.risks.current(gallery)
    rejections: list[KithError | None] = []
    for template, face, hits in zip(templates, faces[:, None], hits_of, strict=True):
        try:
            if not overrides.allow_duplicate:
                one = np.zeros(len(own), np.int64)
                itself = fuse_similarities(face, own, one, qualities).max(initial=-1.0)
                apart = {own_pk, *gallery.outsiders}
                others = [(hit.subject_pk, hit.similarity) for hit in hits if hit.subject_pk not in apart]
                _require_no_duplicate(others, float(itself), gallery, subject_id, store, model, subjects)
            if len(own) and not overrides.allow_inconsistent:
                _require_consistency(float(products(face, own).max()), subject_id, calibration)
        except (DuplicateSubjectError, InconsistentTemplateError) as rejection:
            rejections.append(rejection)
        else:
            rejections.append(None)
            own = np.concatenate([own, face])
            qualities = np.append(qualities, (template.quality or {}).get("score", np.nan))
    return rejections


def _require_no_duplicate(
    others: Sequence[tuple[int, float]],
    itself: float,
    gallery: Gallery,
    subject_id: str,
    store: Store,
    model: ImpostorRisk | None,
    subjects: int,
) -> None:
    """Raise DuplicateSubjectError if another subject is accepted, and more similar than ``itself``.

    ``others``: (subject key, similarity) of the most similar other subjects. Lookalikes may both be enrolled.
    """
    thresholds = thresholds_for(DUPLICATE_RISK, model, subjects)
    alike = [
        candidate
        for candidate in score_candidates(others, thresholds, model, subjects)[:2]
        if thresholds.compared(candidate) >= thresholds.accept and candidate.similarity >= itself
    ]
    named = store.subjects.names(gallery, [candidate.subject_pk for candidate in alike])
    for candidate in alike:
        # A concurrent request may have created the subject itself after the lookup.
        if (other := named.get(candidate.subject_pk)) is not None and other.id != subject_id:
            threshold = thresholds.of_similarity(candidate).accept
            raise DuplicateSubjectError(
                f"the face resembles subject {other.id!r}",
                subject=other.id,
                similarity=round(candidate.similarity, 4),
                threshold=round(threshold, 4),
            )


def _require_consistency(similarity: float, subject_id: str, calibration: Calibration) -> None:
    """Raise InconsistentTemplateError if the best similarity to the subject's templates is too low."""
    threshold = min(calibration.equal_error_threshold(), calibration.threshold_at_fnmr(MAX_FALSE_INCONSISTENT))
    if similarity < threshold:
        raise InconsistentTemplateError(
            f"the face is unlike the other photos of subject {subject_id!r}",
            similarity=round(similarity, 4),
            threshold=round(threshold, 4),
        )

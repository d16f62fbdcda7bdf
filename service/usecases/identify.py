"""Open-set identification (1:N) of faces and embeddings in a gallery."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kith.wire.identification import IdentifyIn
from models.runtime.network import Float
from models.vision.quality_gate import QualityGate
from service.core import deadlines
from service.core.errors import GalleryNotFoundError, KithError, StorageDamagedError
from service.core.photo_errors import ImageError
from service.domain.events import Event
from service.domain.gallery import Gallery, Keys, SubjectFilter, SubjectLabel
from service.domain.outcomes import RiskTarget, to_risk_target
from service.inference.photo_pipeline import Face, Photo, verdict_of
from service.inference.recognizers import ServedRecognizer, check_recognizer, check_vectors
from service.operations.shadow import AnsweredFace
from service.risk.decision import SIMILARITY_STEP, Candidate, refuse_presentation
from service.risk.drift import Decided
from service.risk.known_strangers import without_known_stranger
from service.risk.lookalikes import linked_with, tell_apart
from service.risk.one_face import one_face_per_person
from service.risk.search import Identification, Lookalike
from service.security.callers import Caller
from service.usecases.backend import Backend, process_photos
from service.usecases.documents import (
    DEFAULT_GATE,
    Document,
    face_document,
    problem_document,
    risk_document,
    without_none,
)
from service.usecases.strangers import remember_strangers

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


PROBES_AT_ONCE: Final = 256
"""Probes whose subjects' decoys are in memory together."""


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


async def identify(
    backend: Backend, gallery: Gallery, body: IdentifyIn, caller: Caller
) -> tuple[ServedRecognizer, list[ProbeResult]]:
    """Identify the photos and embeddings of ``body``, and record the decisions.

    Raises:
        ForbiddenError: embeddings or a chosen risk, and the caller lacks the scope vectors.
        As search_gallery, and for a single photo its own error.
    """
    served = backend.faces.recognizers.for_gallery(gallery)
    target = to_risk_target(body.risk, "fpir") if body.risk else gallery.settings.risk
    _check_rights(gallery, body, target, caller)
    among = None
    if body.filter is not None:
        subject_filter = SubjectFilter(tuple(body.filter.tags), tuple(body.filter.metadata.items()))
        among = await backend.run(backend.galleries.store.subjects.matching_pks, gallery, subject_filter)

    shadow = None
    if gallery.other is not None and gallery.other.state == "shadow":
        shadow = backend.faces.recognizers.get(gallery.other.fingerprint)

    detail = body.detail or backend.settings.detail
    # Only a search of the whole gallery at its own risk can tell that it does not know a face.
    remembers = (
        gallery.settings.remember_strangers_days is not None and among is None and target == gallery.settings.risk
    )
    keep_crop = remembers and gallery.settings.keep_crops

    async def embed(payload: bytes) -> Photo:
        return await backend.faces.photos.embed(payload, served, shadow, detail, body.faces == "largest", keep_crop)

    photos = await process_photos(backend, body.photos, embed) if body.photos else []
    quality_gate = gallery.settings.quality_gate if body.check_quality else None
    items = [*_photo_items(gallery, photos, quality_gate), *_embedding_items(gallery, body.embeddings, served)]
    searched = [item for item in items if item.vector is not None]
    if searched:
        if photos:
            gallery = _at_current_version(gallery, await backend.find_gallery(gallery.name))
        probes = np.stack([item.vector for item in searched if item.vector is not None])
        results, names = await search_gallery(backend, gallery, probes, target, body.top_k, among)
        for item, result in zip(searched, results, strict=True):
            item.found = result
        single = [item.found for item in searched]
        wanted = body.one_face_per_person
        if wanted is None:
            wanted = gallery.settings.one_face_per_person
        if wanted and (groups := _faces_together(items)):
            await backend.run(_assign_faces, items, groups)
        if gallery.has_lookalikes:
            names |= await backend.run(_tell_lookalikes_apart, backend, gallery, searched, target, among)
        if shadow is not None:
            # The other recognizer decides on each face by itself, too. Only what the answer says is stored.
            answered = [
                AnsweredFace(item.face, alone, _is_the_same(item.found, alone))
                for item, alone in zip(searched, single, strict=True)
                if item.face and alone
            ]
            backend.galleries.shadow.observe(gallery, answered, target, among)
        for item in searched:
            if item.found is not None:
                shown = item.found if caller.sees_vectors else item.found.coarse()
                item.document |= _decision_fields(shown, names, target)
        if remembers:
            await remember_strangers(backend, gallery, _unknown_faces(items), wanted)
    await _record(backend, gallery, served, items)
    return served, items


def _is_the_same(found: Identification | None, alone: Identification) -> bool:
    """Return whether the answer about the whole photo names whom the face alone does."""
    if found is None or found.decision.outcome != alone.decision.outcome:
        return False
    best, other = found.decision.best, alone.decision.best
    return (best and best.subject_pk) == (other and other.subject_pk)


def _check_rights(gallery: Gallery, body: IdentifyIn, target: RiskTarget, caller: Caller) -> None:
    """Raises ForbiddenError, RecognizerMismatchError."""
    if body.embeddings:
        caller.check_vectors("embeddings")
    if target != gallery.settings.risk:
        caller.check_vectors("risks other than the gallery's")
    if body.recognizer is not None or body.embeddings:
        check_recognizer(gallery, body.recognizer)


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
    return {"candidates": [], "reasons": [], "lookalikes": [], **fields}


def _at_current_version(gallery: Gallery, current: Gallery) -> Gallery:
    """Return ``gallery`` at the current version, so that writes during photo processing are found as well."""
    if current.pk != gallery.pk or current.version == gallery.version:
        return gallery
    return replace(
        gallery,
        version=current.version,
        subjects=current.subjects,
        templates=current.templates,
        has_decoys=current.has_decoys,
        has_lookalikes=current.has_lookalikes,
    )


async def search_gallery(
    backend: Backend,
    gallery: Gallery,
    probes: Float,
    target: RiskTarget,
    k: int,
    among: Keys | None,
) -> tuple[list[Identification], dict[int, SubjectLabel]]:
    """Search (q, d) unit vectors and look up the subjects found, again if one was deleted in between.

    Raises:
        GalleryNotFoundError: the gallery was deleted meanwhile, even if a new gallery has its name.
        StorageDamagedError: the index has a subject that the database does not have.
        DeadlineExceededError, ClientGoneError: the deadline passed, or the client disconnected.
    """
    while True:
        results = await backend.galleries.search.identify(gallery, probes, target, k, among)
        keys = {candidate.subject_pk for result in results for candidate in result.ranked}
        named = backend.galleries.store.subjects.cached_names(gallery, keys)
        if named is None:
            named = await backend.run(backend.galleries.store.subjects.names, gallery, keys)
        if keys <= named.keys():
            if gallery.has_decoys:
                results = await backend.run(_without_known_strangers, backend, gallery, probes, results)
            return results, named
        if (deadline := deadlines.current_deadline()) is not None:
            deadline.check()
        current = await backend.find_gallery(gallery.name)
        if current.pk != gallery.pk:
            # The change log has no further entries for the old gallery: its index would keep deleted subjects.
            await backend.run(backend.galleries.followers.drop, gallery)
            raise GalleryNotFoundError(f"gallery {gallery.name!r} was replaced by another during the request")
        if current.version == gallery.version:  # deleting a subject would have changed it
            raise StorageDamagedError(f"templates of gallery {gallery.name!r} belong to missing subjects")
        gallery = _at_current_version(gallery, current)


def _without_known_strangers(
    backend: Backend, gallery: Gallery, probes: Float, results: Sequence[Identification]
) -> list[Identification]:
    """Return the answers with the decoys of the subjects found, which are read now. Blocks."""
    answers: list[Identification] = []
    for start in range(0, len(results), PROBES_AT_ONCE):
        some = results[start : start + PROBES_AT_ONCE]
        keys = {one.subject_pk for found in some if found.decision.outcome != "unknown" for one in found.ranked}
        decoys = backend.galleries.store.decoys.vectors(gallery, sorted(keys)) if keys else {}
        for found, probe in zip(some, probes[start : start + PROBES_AT_ONCE], strict=True):
            nearest = {
                one.subject_pk: float((decoys[one.subject_pk] @ probe).max())
                for one in found.ranked
                if one.subject_pk in decoys
            }
            answers.append(without_known_stranger(found, nearest))
    return answers


def _faces_together(items: Sequence[ProbeResult]) -> list[list[int]]:
    """Return the positions of the searched faces of each photo that has several."""
    photos: dict[int, list[int]] = defaultdict(list)
    for row, item in enumerate(items):
        if item.face is not None and item.found is not None:
            photos[item.document["image"]].append(row)
    return [rows for rows in photos.values() if len(rows) > 1]


def _assign_faces(items: Sequence[ProbeResult], groups: Sequence[Sequence[int]]) -> None:
    """Identify each person once in each photo. ``other_face`` is a position in ``items`` afterwards."""
    for rows in groups:
        found = [result for row in rows if (result := items[row].found) is not None]
        vectors = np.stack([vector for row in rows if (vector := items[row].vector) is not None])
        for row, result in zip(rows, one_face_per_person(found, vectors), strict=True):
            other = None if result.other_face is None else rows[result.other_face]
            items[row].found = replace(result, other_face=other)


def _tell_lookalikes_apart(
    backend: Backend, gallery: Gallery, searched: Sequence[ProbeResult], target: RiskTarget, among: Keys | None
) -> dict[int, SubjectLabel]:
    """Make faces uncertain whose best subject does not lead its lookalikes; return the lookalikes' names. Blocks."""
    by_best: dict[int, list[ProbeResult]] = defaultdict(list)
    for item in searched:
        best = None if item.found is None else item.found.decision.best
        if item.found is not None and best is not None and item.found.decision.outcome != "unknown":
            by_best[best.subject_pk].append(item)
    store, keys = backend.galleries.store, set[int]()
    for subject_pk in store.lookalikes.linked_among(gallery, sorted(by_best)):
        stored = store.lookalikes.templates(gallery, subject_pk)
        for item in by_best[subject_pk]:
            if item.found is not None and item.vector is not None:
                linked = linked_with(item.found, item.vector, stored, gallery.settings.fusion, among)
                item.found = tell_apart(item.found, linked, target)
                keys |= {one.subject_pk for one in item.found.lookalikes}
    names = store.subjects.names(gallery, keys) if keys else {}
    for item in searched:  # without those erased meanwhile
        if item.found is not None and item.found.lookalikes:
            item.found = replace(
                item.found, lookalikes=[one for one in item.found.lookalikes if one.subject_pk in names]
            )
    return names


def _unknown_faces(items: Iterable[ProbeResult]) -> list[tuple[Document, Face, Identification]]:
    """Return the faces that the gallery does not know, without further faces of a person in the photo."""
    return [
        (item.document, item.face, item.found)
        for item in items
        if item.face and item.found and item.found.decision.outcome == "unknown" and item.found.other_face is None
    ]


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
        reasons=[*_risk_reasons(found), *found.reasons],
        other_face=found.other_face,
        candidates=[_candidate_document(candidate, found, named) for candidate in found.candidates],
        lookalikes=[_lookalike_document(one, found, named) for one in found.lookalikes],
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


def _lookalike_document(lookalike: Lookalike, found: Identification, named: dict[int, SubjectLabel]) -> Document:
    """Return a ``LinkedOut``. Without the scope vectors the probability is coarse: it follows from similarities."""
    subject, chance = named[lookalike.subject_pk], lookalike.probability
    rounded = None if chance is None else round(chance, 4 if found.exact else 1)
    return without_none(subject=subject.id, name=subject.name, probability=rounded)


async def _record(backend: Backend, gallery: Gallery, served: ServedRecognizer, items: Sequence[ProbeResult]) -> None:
    """Record the decisions in metrics, audit, events and drift watch."""
    _observe_similarities(backend, served, items)
    events = _events(gallery, items)
    await backend.operations.audit.searched(gallery, [item.document for item in items], events)
    if events:
        backend.operations.webhooks.wake()
    backend.galleries.watches.of(gallery.pk, gallery.name, gallery.fingerprint).add(_decisions(items))


def _observe_similarities(backend: Backend, served: ServedRecognizer, items: Iterable[ProbeResult]) -> None:
    """Record the best similarities of photos in the metrics, rounded: any key with the scope read sees them."""
    for item in items:
        best = None if item.found is None else item.found.decision.best
        if item.found is not None and best is not None and item.face is not None:
            rounded = math.ceil(best.similarity / SIMILARITY_STEP) * SIMILARITY_STEP
            backend.operations.metrics.observe_similarity(served.pack.model_id, item.found.decision.outcome, rounded)


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


def _decisions(items: Iterable[ProbeResult]) -> Iterator[Decided]:
    """Return the decisions that the drift watch counts; errors are none."""
    for item in items:
        outcome = item.document["outcome"]
        if item.found is not None and item.found.decision.best is not None:
            yield Decided(outcome, item.found.decision.best.similarity, item.found.shown_thresholds.accept)
        elif outcome != "error":
            yield Decided(outcome)

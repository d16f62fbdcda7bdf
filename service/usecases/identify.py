"""Open-set identification (1:N) of faces and embeddings in a gallery: embed, search, decide, answer, record.

Other faces of the photo only make an answer more careful: a face that is not identified by itself never becomes
identified (docs/decisions.md, 57).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from kith.wire.identification import IdentifyIn
from models.runtime.network import Float
from models.vision.face_search import Detail
from models.vision.quality import QualityGate
from service.core import deadlines
from service.core.errors import GalleryNotFoundError, ImageError, KithError, StorageDamagedError
from service.domain.events import Event
from service.domain.gallery import Gallery, Keys, SubjectFilter, SubjectLabel
from service.domain.outcomes import RiskTarget, to_risk_target
from service.inference.photo_pipeline import Face, KeptCrops, Photo, each_photo, verdict_of
from service.inference.recognizers import ServedRecognizer, check_recognizer, check_vectors
from service.risk.decision import refuse_presentation
from service.risk.drift import Decided
from service.risk.one_face import one_face_per_person
from service.risk.search import Identification
from service.risk.threshold import SIMILARITY_STEP, Candidate
from service.security.api_keys import Caller
from service.usecases.backend import Backend
from service.usecases.documents import (
    DEFAULT_GATE,
    Document,
    count_document,
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
    "probability_is_bound",
    "risk",
    "reasons",
)
"""Fields of a result that its event has."""


@dataclass
class Probe:
    """One result of the response.

    ``document``: ``IdentityOut``. ``vector``: the (d,) probe, None if nothing is searched. ``face``: None for an
    embedding. ``found``: result of the search. ``is_weak``: no face of its photo is confident. Such a photo is often
    not upright, and its faces are then useless.
    """

    document: Document
    vector: Float | None = None
    face: Face | None = None
    found: Identification | None = None
    is_weak: bool = False


@dataclass(frozen=True)
class Search:
    """Search of a request, with the gallery's settings where the request has none.

    ``among``: ascending keys of the subjects to search; None: all.
    ``remembers``: unknown faces become strangers.
    """

    served: ServedRecognizer
    target: RiskTarget
    among: Keys | None
    one_face_per_person: bool
    remembers: bool


async def identify(
    backend: Backend, gallery: Gallery, body: IdentifyIn, caller: Caller
) -> tuple[ServedRecognizer, list[Document], list[Probe]]:
    """Identify the photos and embeddings of ``body``, and record the decisions. Return a ``FaceCountOut`` per photo.

    Raises:
        ForbiddenError: embeddings or a chosen risk, and the caller lacks the scope vectors.
        As search_gallery, and for a single photo its own error.
    """
    search = await _search_for(backend, gallery, body, caller)
    detail = body.detail or backend.settings.detail
    keep: KeptCrops = "largest" if search.remembers and gallery.settings.keep_crops else "none"
    embed = partial(backend.photos.embed, recognizer=search.served, detail=detail, keep=keep)
    photos = await each_photo([embed(photo, largest_only=body.faces == "largest") for photo in body.photos])
    quality_gate = gallery.settings.quality_gate if body.check_quality else None
    probes = [
        *_photo_probes(gallery, photos, quality_gate),
        *_embedding_probes(gallery, body.embeddings, search.served),
    ]
    if searched := [probe for probe in probes if probe.vector is not None]:
        if photos:
            gallery = _at_current_version(gallery, await backend.find_gallery(gallery.name))
        vectors = np.stack([probe.vector for probe in searched if probe.vector is not None])
        results, names = await search_gallery(backend, gallery, vectors, search.target, body.top_k, search.among)
        for probe, found in zip(searched, results, strict=True):
            probe.found = found
        if search.one_face_per_person:
            _keep_one_face_per_person(probes)
        for probe in searched:
            if probe.found is not None:
                shown = probe.found if caller.sees_vectors else probe.found.coarse()
                probe.document |= _decision_fields(shown, names, search.target)
        _add_weakness(probes, detail)
        if search.remembers:
            await remember_strangers(backend, gallery, _unknown_faces(probes), search.one_face_per_person)
    await _record(backend, gallery, search.served, probes)
    counts = [{} if isinstance(photo, ImageError) else count_document(photo) for photo in photos]
    return search.served, counts, probes


async def _search_for(backend: Backend, gallery: Gallery, body: IdentifyIn, caller: Caller) -> Search:
    """Raises ForbiddenError, RecognizerMismatchError."""
    settings, recognizers = gallery.settings, backend.recognizers
    served = recognizers.for_gallery(gallery)
    target = to_risk_target(body.risk, "fpir") if body.risk else settings.risk
    is_own_risk = not body.risk or target == settings.risk
    if body.embeddings:
        caller.check_vectors("embeddings")
    if not is_own_risk:
        caller.check_vectors("risks other than the gallery's")
    if body.recognizer is not None or body.embeddings:
        check_recognizer(gallery, body.recognizer)
    among = None
    if body.filter is not None:
        subject_filter = SubjectFilter(tuple(body.filter.tags), tuple(body.filter.metadata.items()))
        among = await backend.threads.run(backend.store.subjects.matching_pks, gallery, subject_filter)
    wanted = body.one_face_per_person
    return Search(
        served,
        target,
        among,
        settings.one_face_per_person if wanted is None else wanted,
        # Only a search of the whole gallery at its own risk can tell that it does not know a face.
        settings.remember_strangers_days is not None and among is None and is_own_risk,
    )


def _photo_probes(
    gallery: Gallery, photos: list[Photo | ImageError], quality_gate: QualityGate | None
) -> Iterator[Probe]:
    """Return an item per face, and one per photo without a face. Raises liveness_unavailable."""
    for i, photo in enumerate(photos):
        if isinstance(photo, KithError):
            yield Probe(_result(image=i, outcome="error", error=problem_document(photo)))
            continue
        if not photo.faces:
            yield Probe(_result(image=i, outcome="no_face"))
        for face in photo.faces:
            quality = quality_gate.reasons(face.quality) if quality_gate else []
            document = face_document(face, quality_gate or DEFAULT_GATE, gallery.settings.liveness_threshold)
            refusal, reasons = refuse_presentation(quality, verdict_of(gallery, face))
            result = _result(image=i, face=document, outcome=refusal or "unknown", reasons=reasons)
            yield Probe(result, None if refusal else face.vector, face, is_weak=not photo.is_confident)


def _embedding_probes(gallery: Gallery, embeddings: list[Any], served: ServedRecognizer) -> Iterator[Probe]:
    for i, vector in enumerate(check_vectors(embeddings, served.dimension)):
        refusal, reasons = refuse_presentation([], verdict_of(gallery, None))
        result = _result(embedding=i, outcome=refusal or "unknown", reasons=reasons)
        yield Probe(result, None if refusal else vector)


def _result(**fields: Any) -> Document:
    return {"candidates": [], "reasons": [], **fields}


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
        results = await backend.search.identify(gallery, probes, target, k, among)
        keys = {candidate.subject_pk for result in results for candidate in (*result.first, *result.candidates)}
        named = backend.store.cache.names.get(gallery, keys)
        if len(named) < len(keys):
            named = await backend.threads.run(backend.store.subjects.names, gallery, keys)
        if keys <= named.keys():
            return results, named
        deadlines.check()
        current = await backend.find_gallery(gallery.name)
        if current.pk != gallery.pk:
            # The change log has no further entries for the old gallery: its index would keep deleted subjects.
            await backend.threads.run(backend.followers.drop, gallery)
            raise GalleryNotFoundError(f"gallery {gallery.name!r} was replaced by another during the request")
        if current.version == gallery.version:  # deleting a subject would have changed it
            raise StorageDamagedError(f"templates of gallery {gallery.name!r} belong to missing subjects")
        gallery = _at_current_version(gallery, current)


def _at_current_version(gallery: Gallery, current: Gallery) -> Gallery:
    """Return ``gallery`` at the current version, so that writes during photo processing are found as well."""
    if current.pk != gallery.pk or current.version == gallery.version:
        return gallery
    return replace(
        gallery,
        version=current.version,
        subjects=current.subjects,
        templates=current.templates,
        outsiders=current.outsiders,
    )


def _keep_one_face_per_person(probes: Sequence[Probe]) -> None:
    """Identify each person once in each photo. ``other_face`` is a position in ``probes`` afterwards."""
    photos: dict[int, list[int]] = defaultdict(list)
    for row, probe in enumerate(probes):
        if probe.face is not None and probe.found is not None:
            photos[probe.document["image"]].append(row)
    for rows in (several for several in photos.values() if len(several) > 1):
        found = [result for row in rows if (result := probes[row].found) is not None]
        for row, result in zip(rows, one_face_per_person(found), strict=True):
            other = None if result.other_face is None else rows[result.other_face]
            probes[row].found = replace(result, other_face=other)


def _decision_fields(found: Identification, named: dict[int, SubjectLabel], target: RiskTarget) -> Document:
    """Return the fields that a search adds to an ``IdentityOut``."""
    decision, best, thresholds = found.decision, found.decision.best, found.shown_thresholds
    subject = named[best.subject_pk] if decision.outcome == "identified" and best is not None else None
    probability, is_bound = found.shown_probability(best) if best else (None, None)
    return without_none(
        outcome=decision.outcome,
        subject=subject.id if subject else None,
        name=subject.name if subject else None,
        similarity=round(best.similarity, 4) if best else None,
        threshold=round(thresholds.accept, 4),
        review_threshold=round(thresholds.review, 4),
        runner_up=_candidate_document(decision.runner_up, found, named) if decision.runner_up else None,
        margin=round(decision.margin, 4) if decision.margin is not None else None,
        false_alarm_probability=probability,
        probability_is_bound=is_bound,
        risk=risk_document(target, thresholds),
        reasons=[*(["risk_out_of_reach"] if found.thresholds.out_of_reach else []), *found.reasons],
        other_face=found.other_face,
        candidates=[_candidate_document(candidate, found, named) for candidate in found.candidates],
    )


def _candidate_document(candidate: Candidate, found: Identification, named: dict[int, SubjectLabel]) -> Document:
    subject = named[candidate.subject_pk]
    probability, is_bound = found.shown_probability(candidate)
    return without_none(
        subject=subject.id,
        name=subject.name,
        similarity=round(candidate.similarity, 4),
        false_alarm_probability=probability,
        probability_is_bound=is_bound,
    )


def _add_weakness(probes: Iterable[Probe], detail: Detail) -> None:
    reasons = ["weak_detection", *(["try_detail_medium"] if detail == "low" else [])]
    for probe in probes:
        if probe.is_weak and probe.found is not None:
            probe.document["reasons"] = [*probe.document["reasons"], *reasons]


def _unknown_faces(probes: Iterable[Probe]) -> list[tuple[Document, Face, Identification]]:
    """Return the faces that the gallery does not know, without weak ones and further faces of a person in the photo."""
    return [
        (probe.document, probe.face, probe.found)
        for probe in probes
        if not probe.is_weak
        and probe.face
        and probe.found
        and probe.found.decision.outcome == "unknown"
        and probe.found.other_face is None
    ]


async def _record(backend: Backend, gallery: Gallery, served: ServedRecognizer, probes: Sequence[Probe]) -> None:
    """Record the decisions in metrics, audit, events and drift watch."""
    _observe_similarities(backend, served, probes)
    events = _events(gallery, probes)
    await backend.audit.searched(gallery, [probe.document for probe in probes], events)
    if events:
        backend.webhooks.wake()
    backend.watches.of(gallery.pk, gallery.name, gallery.fingerprint).add(_decisions(probes))


def _observe_similarities(backend: Backend, served: ServedRecognizer, probes: Iterable[Probe]) -> None:
    """Record the best similarities of photos in the metrics, rounded: any key with the scope read sees them."""
    for probe in probes:
        best = None if probe.found is None else probe.found.decision.best
        if probe.found is not None and best is not None and probe.face is not None:
            rounded = math.ceil(best.similarity / SIMILARITY_STEP) * SIMILARITY_STEP
            backend.metrics.similarities.labels(served.pack.model_id, probe.found.decision.outcome).observe(rounded)


def _events(gallery: Gallery, probes: Iterable[Probe]) -> list[Event]:
    """Return the decisions that a webhook wants, as the response states them."""
    if not gallery.listeners:
        return []
    events = [
        Event(
            "decision",
            {k: probe.document[k] for k in EVENT_FIELDS if k in probe.document},
            probe.document.get("subject"),
        )
        for probe in probes
        if probe.document["outcome"] != "error" and not probe.is_weak
    ]
    return [event for event in events if any(chosen.wants(gallery.name, event) for chosen in gallery.listeners)]


def _decisions(probes: Iterable[Probe]) -> Iterator[Decided]:
    """Return the decisions that the drift watch counts; errors are none."""
    for probe in probes:
        outcome = probe.document["outcome"]
        if probe.found is not None and probe.found.decision.best is not None:
            yield Decided(outcome, probe.found.decision.best.similarity, probe.found.shown_thresholds.accept)
        elif outcome != "error":
            yield Decided(outcome)

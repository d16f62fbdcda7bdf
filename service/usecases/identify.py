"""Open-set identification (1:N) of faces and embeddings in a gallery: embed, search, decide, answer, record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from kith.wire.identification import IdentifyIn
from models.vision.face_search import Detail
from service.core.errors import ImageError
from service.domain.events import Event
from service.domain.gallery import Gallery, Keys, SubjectFilter, SubjectLabel
from service.domain.outcomes import RiskTarget, to_risk_target
from service.inference.photo_pipeline import Face, KeptCrops, Photo, each_photo
from service.inference.recognizers import ServedRecognizer, check_recognizer
from service.risk.decision import SIMILARITY_STEP
from service.risk.drift import Decided
from service.risk.search import Identification
from service.security.callers import Caller
from service.usecases.backend import Backend
from service.usecases.documents import Document, count_document
from service.usecases.gallery_search import at_current_version, keep_one_face_per_person, search_gallery
from service.usecases.probes import Probe, decision_fields, embedding_probes, photo_probes
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
    photos = await _embed(backend, gallery, body, search)
    quality_gate = gallery.settings.quality_gate if body.check_quality else None
    probes = [
        *photo_probes(gallery, photos, quality_gate),
        *embedding_probes(gallery, body.embeddings, search.served),
    ]
    if searched := [probe for probe in probes if probe.vector is not None]:
        if photos:
            gallery = at_current_version(gallery, await backend.find_gallery(gallery.name))
        names = await _decide(backend, gallery, probes, search, body.top_k)
        for probe in searched:
            if probe.found is not None:
                shown = probe.found if caller.sees_vectors else probe.found.coarse()
                probe.document |= decision_fields(shown, names, search.target)
        _add_weakness(probes, body.detail or backend.settings.detail)
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
    if body.embeddings:
        caller.check_vectors("embeddings")
    if target != settings.risk:
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
        settings.remember_strangers_days is not None and among is None and target == settings.risk,
    )


async def _embed(backend: Backend, gallery: Gallery, body: IdentifyIn, search: Search) -> list[Photo | ImageError]:
    detail = body.detail or backend.settings.detail
    keep: KeptCrops = "largest" if search.remembers and gallery.settings.keep_crops else "none"
    largest_only = body.faces == "largest"
    embed = partial(backend.photos.embed, recognizer=search.served, detail=detail, largest_only=largest_only, keep=keep)
    return await each_photo([embed(photo) for photo in body.photos])


async def _decide(
    backend: Backend, gallery: Gallery, probes: Sequence[Probe], search: Search, k: int
) -> dict[int, SubjectLabel]:
    """Set what was found of each probe with a vector; return the names of the subjects found."""
    searched = [probe for probe in probes if probe.vector is not None]
    vectors = np.stack([probe.vector for probe in searched if probe.vector is not None])
    results, names = await search_gallery(backend, gallery, vectors, search.target, k, search.among)
    for probe, found in zip(searched, results, strict=True):
        probe.found = found
    if search.one_face_per_person:
        keep_one_face_per_person(probes)
    return names


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
            backend.metrics.observe_similarity(served.pack.model_id, probe.found.decision.outcome, rounded)


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

"""Remember unknown faces of identified photos as strangers, if the gallery has them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

from service.core.errors import GalleryMovedError, StorageError
from service.domain.gallery import Gallery
from service.inference.photo_pipeline import Face
from service.risk.search import Identification
from service.risk.strangers import recall
from service.storage.repositories.strangers import Sighting
from service.usecases.backend import Backend
from service.usecases.documents import Document

NOT_STORED: Final = "stranger_not_stored"
"""Reason in a result: the stranger is missing because the strangers could not be read or written."""
log = logging.getLogger(__name__)


async def remember_strangers(
    backend: Backend,
    gallery: Gallery,
    unknown: Sequence[tuple[Document, Face, Identification]],
    once_per_photo: bool,
) -> None:
    """Add the remembered or new stranger to the result of each unknown face.

    Only faces count that enrollment would take. A failure to write does not fail the search. ``once_per_photo``: the
    faces of a photo are of different people.
    """
    gate = gallery.settings.quality_gate
    usable = [
        (document, face, face.vector, found)
        for document, face, found in unknown
        if face.vector is not None and not gate.reasons(face.quality)
    ]
    if not usable:
        return
    sightings = [
        Sighting(
            uuid.uuid4().hex,
            vector,
            "photo",
            face.quality.as_dict(),
            face.score,
            face.kept,
            photo=document["image"] if once_per_photo else None,
        )
        for document, face, vector, _ in usable
    ]
    model = usable[0][3].model  # the searches of one request have the same risk
    rule = partial(recall, model=model, settings=gallery.settings)
    store = backend.store.strangers
    try:
        nearest, now = backend.followers.nearest, datetime.now(UTC)
        seen, reported = await backend.threads.run(store.remember, gallery, sightings, nearest, rule, now)
    except (StorageError, GalleryMovedError) as error:
        log.warning("strangers of gallery %d are not remembered: %s", gallery.pk, error.detail)
        for document, *_ in usable:
            document["reasons"] = [*document["reasons"], NOT_STORED]
        return
    for (document, *_), stranger in zip(usable, seen, strict=True):
        if stranger is not None:
            document["stranger"] = stranger.sighting()
    if reported:
        backend.webhooks.wake()

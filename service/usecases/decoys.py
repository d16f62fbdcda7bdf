"""Decoys: a photo or an embedding that was mistaken for a subject."""

from __future__ import annotations

from kith.wire.subjects import ChecksIn, DecoyIn, DecoyOut
from service.core.errors import InvalidRequestError
from service.domain.gallery import Gallery, NewTemplate
from service.inference.recognizers import check_recognizer, check_vectors
from service.security.api_keys import Caller
from service.usecases.backend import Backend
from service.usecases.enrollment_checks import choose_face, embed_for, enroll_on, new_template, template_from_face


async def add_decoy(
    backend: Backend, snapshot: Gallery, caller: Caller, subject: str, body: DecoyIn
) -> tuple[DecoyOut, bool]:
    """Store the photo or embedding of ``body`` as a decoy. Return it, and whether it is new.

    Raises InvalidRequestError: not exactly one. ForbiddenError: an embedding, without the scope vectors. no_face,
    several_faces, low_quality, ImageError; as DecoyStore.add.
    """
    if len(body.photos) + len(body.embeddings) != 1:
        raise InvalidRequestError("send exactly one photo or embedding")

    async def add(gallery: Gallery) -> tuple[DecoyOut, bool]:
        template = await _embed(backend, gallery, body)
        return await backend.threads.run(backend.store.decoys.add, gallery, subject, template)

    return await enroll_on(backend, snapshot, caller, body, add)


async def _embed(backend: Backend, gallery: Gallery, body: DecoyIn) -> NewTemplate:
    # A decoy lets no face in, so it may be a picture of a picture.
    checks = ChecksIn(allow_low_quality=body.allow_low_quality, allow_not_live=True)
    if body.embeddings:
        check_recognizer(gallery, body.recognizer)
        (vector,) = check_vectors(body.embeddings, backend.recognizers.for_gallery(gallery).dimension)
        return new_template(vector, gallery, checks)
    photo = await embed_for(backend, gallery, body.photos[0], body.detail)
    return template_from_face(choose_face(photo, body.face, gallery.settings.quality_gate), gallery, checks)

"""Templates of the key's gallery, which CompreFace calls faces or examples: list, add, delete, picture."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Annotated, Any
from uuid import UUID

from fastapi import Query, Response

from kith.wire.crops import CropIn
from kith.wire.fields import SubjectId
from kith.wire.subjects import EnrollIn
from service.api.compreface.access import ENROLL, READ, RECOGNITION, BoundGallery
from service.api.compreface.requests import MAX_ERASED, FileDep, ImageId, ImageIds, OptionsDep, SubjectQuery
from service.api.compreface.responses import example
from service.api.http.access import BackendDep, CallerDep, router
from service.api.http.bodies import JsonBody
from service.api.http.parameters import IdempotencyKey
from service.core.errors import NotFoundError, SubjectNotFoundError
from service.domain.gallery import Gallery, Template
from service.usecases.backend import Backend
from service.usecases.enroll import enroll

routes = router(f"{RECOGNITION}/faces")


@routes.get("", dependencies=[READ])
async def list_faces(
    gallery: BoundGallery,
    backend: BackendDep,
    page: Annotated[int, Query(ge=0)] = 0,
    size: Annotated[int, Query(ge=1, le=2000)] = 20,
    subject: SubjectQuery = "",
) -> dict[str, Any]:
    """List a page of templates of a subject, or of all, oldest first. The page of an unknown subject is empty."""
    found, total = [], 0
    with suppress(SubjectNotFoundError):
        found = await backend.threads.run(
            backend.store.templates.list_page, gallery, subject or None, None, size, page * size
        )
        total = gallery.templates
        if subject:
            total = (await backend.threads.run(backend.store.subjects.get, gallery, subject)).template_count
    return {
        "faces": [example(template) for template in found],
        "page_number": page,
        "page_size": size,
        "total_pages": math.ceil(total / size),
        "total_elements": total,
    }


@routes.post("", dependencies=[ENROLL], status_code=201)
async def add_face(
    gallery: BoundGallery,
    backend: BackendDep,
    caller: CallerDep,
    file: FileDep,
    subject: SubjectId,
    options: OptionsDep,
    key: IdempotencyKey = None,
) -> dict[str, Any]:
    """Enroll a photo with one face. ``det_prob_threshold`` is ignored: the gallery's quality gate applies."""
    body = EnrollIn(detail=options.detail).model_copy(update={"images": [file]})
    done = await enroll(backend, gallery, caller, subject, body, key, only_new=False)
    (result,) = json.loads(done.document)["results"]
    return {"image_id": str(UUID(hex=result["template"])), "subject": subject}


@routes.delete("", dependencies=[ENROLL])
async def delete_faces(gallery: BoundGallery, backend: BackendDep, subject: SubjectQuery = "") -> dict[str, Any]:
    """Erase all templates of a subject, or of all subjects. The subjects stay."""
    try:
        found = await backend.threads.run(backend.store.templates.list_page, gallery, subject or None)
    except SubjectNotFoundError:  # clients delete before they enroll
        return {"deleted": 0}
    return {"deleted": len(await _delete(backend, gallery, [template.id for template in found]))}


@routes.delete("/{image_id}", dependencies=[ENROLL])
async def delete_face(gallery: BoundGallery, image_id: ImageId, backend: BackendDep) -> dict[str, Any]:
    """Erase a template."""
    template = await backend.threads.run(backend.store.templates.get, gallery, None, image_id.hex)
    await _delete(backend, gallery, [template.id])
    return example(template)


@routes.post("/delete", dependencies=[ENROLL])
async def delete_many(
    gallery: BoundGallery, image_ids: JsonBody[ImageIds], backend: BackendDep
) -> list[dict[str, Any]]:
    """Erase the templates with these ids. Ids that do not exist are left out of the response."""
    return [example(template) for template in await _delete(backend, gallery, [each.hex for each in image_ids.root])]


@routes.get("/{image_id}/img", dependencies=[READ])
async def download(gallery: BoundGallery, image_id: ImageId, backend: BackendDep) -> Response:
    """Return the stored crop of a template."""
    template = await backend.threads.run(backend.store.templates.get, gallery, None, image_id.hex)
    crop = CropIn(subject=template.subject, template=template.id)
    (image,) = await backend.threads.run(backend.store.crops.read, gallery, [crop])
    if image is None:
        raise NotFoundError("crop", f"no crop of template {template.id!r} is stored")
    await backend.audit.crops_read(gallery, [crop])
    return Response(image, media_type="image/webp")


async def _delete(backend: Backend, gallery: Gallery, ids: list[str]) -> list[Template]:
    """Erase templates, each with its receipt, in transactions of MAX_ERASED. Return those that existed until now."""
    deleted = []
    for start in range(0, len(ids), MAX_ERASED):
        some = ids[start : start + MAX_ERASED]
        deleted += await backend.change_templates(gallery, backend.store.templates.delete_many, some)
    return deleted

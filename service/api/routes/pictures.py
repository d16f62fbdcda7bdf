"""Stored face crops of subjects and templates."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from service.api.http.backend import BackendDep
from service.api.http.openapi import PROBLEMS
from service.api.http.parameters import GalleryPath, SubjectPath
from service.api.http.permissions import READ, permitted
from service.api.http.routing import PermittedRoute
from service.api.routes.subjects import TemplatePath
from service.domain.gallery import Gallery
from service.usecases.backend import Backend

MEDIA_TYPE: Final = "image/webp"
PICTURE: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        "description": "The crop, as WebP.",
    }
}

router = APIRouter(
    route_class=PermittedRoute, prefix="/v1/galleries/{gallery}/subjects", tags=["subjects"], responses=PROBLEMS
)


@router.get("/{subject}/thumbnail", response_class=Response, responses=PICTURE)
@permitted(READ)
async def get_thumbnail(gallery: GalleryPath, subject: SubjectPath, request: Request, backend: BackendDep) -> Response:
    """Return the stored crop of the subject's template with the best quality."""
    return await picture_response(request, backend, await backend.find_gallery(gallery), subject, None)


@router.get("/{subject}/templates/{template}/crop", response_class=Response, responses=PICTURE)
@permitted(READ)
async def get_crop(
    gallery: GalleryPath, subject: SubjectPath, template: TemplatePath, request: Request, backend: BackendDep
) -> Response:
    """Return the stored crop of a template. Crops are stored only if the gallery's ``keep_crops`` is true."""
    return await picture_response(request, backend, await backend.find_gallery(gallery), subject, template)


async def picture_response(
    request: Request, backend: Backend, gallery: Gallery, subject: str, template: str | None
) -> Response:
    """Return a crop with its ETag, and record who read it; 304 if the client has it.

    Raises SubjectNotFoundError, TemplateNotFoundError, CropNotFoundError.
    """
    template_id, crop = await backend.run(backend.galleries.store.templates.crop, gallery, subject, template)
    etag = f'"{hashlib.sha256(crop.image).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    if etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    await backend.operations.audit.crop_read(gallery, subject, template_id)
    return Response(crop.image, headers=headers, media_type=MEDIA_TYPE)

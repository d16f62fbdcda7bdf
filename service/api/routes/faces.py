"""Detection and embedding of faces, without a gallery."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kith.wire.faces import FacesOut
from service.api.http.bodies import read_photos
from service.api.http.context import ContextDep
from service.api.http.openapi import PROBLEMS, request_body
from service.api.http.photos import process_photos
from service.api.http.responses import json_response, photo_document
from service.api.http.routing import PermittedRoute
from service.schemas.faces import DetectIn, EmbedIn

router = APIRouter(route_class=PermittedRoute, tags=["faces"], responses=PROBLEMS)


@router.post("/v1/detect", response_model=FacesOut, openapi_extra=request_body(DetectIn))
async def detect(request: Request, context: ContextDep) -> Response:
    """Detect the faces in one or more photos: boxes, five landmarks, scores and quality."""
    with context.metrics.stage("read"):
        body = await read_photos(request, DetectIn, context.settings)
    photos = await process_photos(context, body.photos, context.pipeline.photos.detect)
    return json_response(
        {"model": context.recognizers.default.pack.model_id, "images": [photo_document(photo) for photo in photos]}
    )


@router.post("/v1/embed", response_model=FacesOut, openapi_extra=request_body(EmbedIn))
async def embed(request: Request, context: ContextDep) -> Response:
    """Detect the faces in one or more photos and compute the embedding of each, a unit vector."""
    with context.metrics.stage("read"):
        body = await read_photos(request, EmbedIn, context.settings)
    by = context.recognizers.by_name(body.model)
    photos = await process_photos(context, body.photos, lambda payload: context.pipeline.photos.embed(payload, by))
    images = [photo_document(photo) for photo in photos]
    return json_response({"model": by.pack.model_id, "recognizer": by.fingerprint, "images": images})

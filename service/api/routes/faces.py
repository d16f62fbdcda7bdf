"""Faces: detection, embedding, and verification (1:1) of two photos, embeddings or one subject."""

from __future__ import annotations

from fastapi import Request, Response

from kith.wire.faces import DetectIn, EmbedIn, FacesOut
from kith.wire.verification import VerifyIn, VerifyOut
from service.api.http.bodies import read_photos, read_verify
from service.api.http.route_errors import SEARCH
from service.api.http.routing import IDENTIFY, PHOTO, BackendDep, CallerDep, Routes, json_response
from service.core.errors import (
    EmbeddingError,
    GalleryNotFoundError,
    LivenessUnavailableError,
    ModelNotServedError,
    SubjectNotFoundError,
    TemplateNotFoundError,
)
from service.inference.photo_pipeline import Photo
from service.usecases import verify as verification
from service.usecases.backend import process_photos
from service.usecases.documents import photo_document

routes = Routes("", "faces")


@routes.add("POST", "/v1/detect", IDENTIFY, response_model=FacesOut, photos=DetectIn, example={"images": [PHOTO]})
async def detect(request: Request, backend: BackendDep) -> Response:
    """Detect the faces in one or more photos: boxes, five landmarks, scores and quality."""
    with backend.operations.metrics.stage("read"):
        body = await read_photos(request, DetectIn, backend.settings)
    detail = body.detail or backend.settings.detail
    photos = await process_photos(backend, body.photos, lambda payload: backend.faces.photos.detect(payload, detail))
    return json_response(
        {
            "model": backend.faces.recognizers.default.pack.model_id,
            "images": [photo_document(photo) for photo in photos],
        }
    )


@routes.add(
    "POST",
    "/v1/embed",
    IDENTIFY,
    response_model=FacesOut,
    photos=EmbedIn,
    example={"images": [PHOTO]},
    errors=(ModelNotServedError,),
)
async def embed(request: Request, backend: BackendDep) -> Response:
    """Detect the faces in one or more photos and compute the embedding of each, a unit vector."""
    with backend.operations.metrics.stage("read"):
        body = await read_photos(request, EmbedIn, backend.settings)
    by, detail = backend.faces.recognizers.by_name(body.model), body.detail or backend.settings.detail

    async def process(payload: bytes) -> Photo:
        return await backend.faces.photos.embed(payload, by, detail=detail)

    photos = await process_photos(backend, body.photos, process)
    images = [photo_document(photo) for photo in photos]
    return json_response({"model": by.pack.model_id, "recognizer": by.fingerprint, "images": images})


@routes.add(
    "POST",
    "/v1/verify",
    IDENTIFY,
    response_model=VerifyOut,
    body="sides",
    photos=VerifyIn,
    example={
        "a": {"image": PHOTO},
        "b": {"subject": {"gallery": "staff", "subject": "ada"}},
        "risk": {"fmr": 0.001},
    },
    errors=(
        *SEARCH,
        EmbeddingError,
        GalleryNotFoundError,
        SubjectNotFoundError,
        TemplateNotFoundError,
        ModelNotServedError,
        LivenessUnavailableError,
    ),
)
async def verify(request: Request, backend: BackendDep, caller: CallerDep) -> Response:
    """Decide if two sides are the same person: photos (their largest face), embeddings, or one of them and a subject.

    If a side is a subject, an embedding and a chosen risk need the scope vectors. Without it, the similarity is coarse,
    and left out below the review threshold.
    """
    with backend.operations.metrics.stage("read"):
        body = await read_verify(request, backend.settings, backend.faces.recognizers.largest_dimension)
    return json_response(await verification.verify(backend, body, caller))

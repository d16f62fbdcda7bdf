"""Faces: detection, embedding, and verification (1:1) of two photos, embeddings or one subject."""

from __future__ import annotations

from fastapi import Response

from kith.wire.faces import DetectIn, EmbedIn, FacesOut
from kith.wire.verification import VerifyIn, VerifyOut
from service.api.http.access import IDENTIFY, BackendDep, CallerDep, json_response, router
from service.api.http.bodies import PhotosBody
from service.api.http.openapi import PHOTO, example
from service.inference.photo_pipeline import each_photo
from service.usecases import verify as verification
from service.usecases.documents import photo_document

routes = router("", "faces")


@routes.post("/v1/detect", dependencies=[IDENTIFY], response_model=FacesOut, openapi_extra=example({"images": [PHOTO]}))
async def detect(body: PhotosBody[DetectIn], backend: BackendDep) -> Response:
    """Detect the faces in one or more photos: boxes, five landmarks, scores and quality."""
    detail = body.detail or backend.settings.detail
    photos = await each_photo([backend.photos.detect(photo, detail) for photo in body.photos])
    return json_response(
        {
            "model": backend.recognizers.default.pack.model_id,
            "images": [photo_document(photo) for photo in photos],
        }
    )


@routes.post("/v1/embed", dependencies=[IDENTIFY], response_model=FacesOut, openapi_extra=example({"images": [PHOTO]}))
async def embed(body: PhotosBody[EmbedIn], backend: BackendDep) -> Response:
    """Detect the faces in one or more photos and compute the embedding of each, a unit vector."""
    by, detail = backend.recognizers.by_name(body.model), body.detail or backend.settings.detail
    photos = await each_photo([backend.photos.embed(photo, by, detail=detail) for photo in body.photos])
    images = [photo_document(photo) for photo in photos]
    return json_response({"model": by.pack.model_id, "recognizer": by.fingerprint, "images": images})


@routes.post(
    "/v1/verify",
    dependencies=[IDENTIFY],
    response_model=VerifyOut,
    openapi_extra=example(
        {
            "a": {"image": PHOTO},
            "b": {"subject": {"gallery": "staff", "subject": "ada"}},
            "risk": {"fmr": 0.001},
        }
    ),
)
async def verify(body: PhotosBody[VerifyIn], backend: BackendDep, caller: CallerDep) -> Response:
    """Decide if two sides are the same person: photos (their largest face), embeddings, or one of them and a subject.

    If a side is a subject, an embedding and a chosen risk need the scope vectors. Without it, the similarity is coarse,
    and left out below the review threshold.
    """
    return json_response(await verification.verify(backend, body, caller))

"""Detect and embed: what needs no gallery."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.api import answers
from service.api.answers import answer
from service.api.context import Kith
from service.api.openapi import PROBLEMS, body_of
from service.api.permissions import Permitted
from service.api.photos import gather_photos
from service.api.requests import read_photos
from service.api.schemas import DetectIn, EmbedIn, FacesOut

router = APIRouter(route_class=Permitted, tags=["faces"], responses=PROBLEMS)


@router.post("/v1/detect", response_model=FacesOut, openapi_extra=body_of(DetectIn))
async def detect(request: Request, kith: Kith) -> Response:
    """Find the faces of one or many photos: boxes, five landmarks, scores, quality."""
    with kith.measures.stage("read"):
        body = await read_photos(request, DetectIn, kith.settings)
    seen = await gather_photos(kith, body.photos, kith.pipeline.detect)
    return answer({"model": kith.recognisers.default.pack.model_id, "images": [answers.photo(one) for one in seen]})


@router.post("/v1/embed", response_model=FacesOut, openapi_extra=body_of(EmbedIn))
async def embed(request: Request, kith: Kith) -> Response:
    """Find the faces of one or many photos and give each its embedding, a unit vector."""
    with kith.measures.stage("read"):
        body = await read_photos(request, EmbedIn, kith.settings)
    by = kith.recognisers.named(body.model)
    seen = await gather_photos(kith, body.photos, lambda payload: kith.pipeline.embed(payload, by))
    images = [answers.photo(one) for one in seen]
    return answer({"model": by.pack.model_id, "recogniser": by.fingerprint, "images": images})

"""Detect and embed: what needs no gallery."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from service.api import answers
from service.api.answers import answer
from service.api.context import Context, Kith
from service.api.openapi import PROBLEMS, body_of
from service.api.permissions import Permitted
from service.api.requests import read_photos
from service.api.schemas import DetectIn, EmbedIn, FacesOut
from service.errors import ImageError, InvalidRequestError
from service.pipeline import Photo

router = APIRouter(route_class=Permitted, tags=["faces"], responses=PROBLEMS)
Result = TypeVar("Result")


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


async def gather_photos(
    kith: Context, photos: list[bytes | str], stage: Callable[[bytes], Awaitable[Photo]]
) -> list[Photo | ImageError]:
    """Put every photo through ``stage``, fetched where it is a URL; one bad photo of several fails alone, a lone one
    fails the call.

    Raises InvalidRequestError without photos, and a lone photo's own error.
    """
    if not photos:
        raise InvalidRequestError("images, urls: at least one photo is needed")

    async def at_hand(photo: bytes | str) -> Photo:
        return await stage(photo if isinstance(photo, bytes) else await fetched(kith, photo))

    if len(photos) == 1:
        return [await at_hand(photos[0])]

    async def guarded(photo: bytes | str) -> Photo | ImageError:
        try:
            return await at_hand(photo)
        except ImageError as error:
            return error

    return await together([guarded(photo) for photo in photos])


async def fetched(kith: Context, url: str) -> bytes:
    """The photo at ``url``, where KITH_URL_HOSTS allows it. Raises as :meth:`service.fetching.Fetcher.fetch` does."""
    with kith.measures.stage("fetch"):
        return await kith.fetcher.fetch(url)


async def together(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results, in order, or the first error."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # where one fails all, nobody wants the others
            task.cancel()

"""Concurrent processing of a request's photos."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from service.core.errors import InvalidRequestError
from service.core.photo_errors import ImageError
from service.inference.photo_pipeline import Photo
from service.usecases.backend import Backend

Result = TypeVar("Result")


async def process_photos(
    backend: Backend, photos: list[bytes | str], stage: Callable[[bytes], Awaitable[Photo]]
) -> list[Photo | ImageError]:
    """Apply ``stage`` to every photo; a photo given as a URL is fetched first.

    An error of one of several photos is its result. An error of a single photo is raised.

    Raises InvalidRequestError: there is no photo.
    """
    if not photos:
        raise InvalidRequestError("send at least one photo in images or urls")

    async def process(photo: bytes | str) -> Photo:
        return await stage(photo if isinstance(photo, bytes) else await fetch_photo(backend, photo))

    if len(photos) == 1:
        return [await process(photos[0])]

    async def process_or_return_error(photo: bytes | str) -> Photo | ImageError:
        try:
            return await process(photo)
        except ImageError as error:
            return error

    return await gather_or_cancel([process_or_return_error(photo) for photo in photos])


async def fetch_photo(backend: Backend, url: str) -> bytes:
    """Fetch the photo at ``url`` if KITH_URL_HOSTS allows it.

    Raises as :meth:`service.inference.url_fetching.UrlFetcher.fetch`.
    """
    with backend.operations.metrics.stage("fetch"):
        return await backend.faces.fetcher.fetch(url)


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return all results in order. On the first error, cancel the others and raise it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

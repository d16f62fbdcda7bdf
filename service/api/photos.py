"""A request's photos: at hand or fetched, put through a stage together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from service.api.context import Context
from service.errors import ImageError, InvalidRequestError
from service.pipeline import Photo

Result = TypeVar("Result")


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

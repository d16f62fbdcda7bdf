"""What a request's gallery was when its head came: its body may take minutes, and who is erased meanwhile stays so."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any, Final, cast

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

from service.api.context import Context
from service.api.galleries import GalleryPath
from service.api.permissions import Permitted
from service.api.schemas import GALLERY_NAME
from service.errors import GalleryNotFoundError
from service.gallery.subjects import Gallery

WITH_BODIES: Final = frozenset({"POST", "PUT", "PATCH"})


class _Noting(APIRoute):
    """Reads the gallery first: where a body is a parameter, dependencies are asked after it has arrived."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if WITH_BODIES.isdisjoint(self.methods or ()):
            return handle

        async def noting(request: Request) -> Response:
            kith, name = cast(Context, request.app.state.context), request.path_params["gallery"]
            with suppress(GalleryNotFoundError):  # which is said when the rest of the request was found in order
                if re.match(GALLERY_NAME, name):
                    request.state.begun = await kith.gallery(name)
            return await handle(request)

        return noting


class Noted(Permitted, _Noting):
    """A permitted route that notes its gallery before the body is read, and after the key was looked at."""


async def _begun(gallery: GalleryPath, request: Request) -> Gallery:
    """Raises GalleryNotFoundError."""
    begun: Gallery | None = getattr(request.state, "begun", None)
    if begun is None:
        raise GalleryNotFoundError(f"there is no gallery {gallery!r}")
    return begun


Begun = Annotated[Gallery, Depends(_begun)]
"""The gallery as it was when the request began; only of a route that is Noted."""

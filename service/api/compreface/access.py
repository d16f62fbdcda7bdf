"""Which gallery a key stands for, and what each route requires. CompreFace's keys name one face collection each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request

from service.api.http.routing import PermittedRoute, backend_of, caller_of
from service.core.errors import ForbiddenError
from service.domain.gallery import Gallery
from service.security.callers import Caller
from service.usecases.backend import Backend

PREFIX: Final = "/api/v1"
RECOGNITION: Final = f"{PREFIX}/recognition"


def bound_gallery(caller: Caller) -> str:
    """Return the key's only gallery. Raises ForbiddenError: the key is for several galleries, or for all."""
    galleries = caller.rights.galleries
    if galleries is None or len(galleries) != 1:
        raise ForbiddenError(
            "these routes need a key for exactly one gallery",
            "Create one: kith keys create --scope identify --scope read --scope enroll --gallery NAME.",
        )
    (name,) = galleries
    return name


class CompreFaceRoute(PermittedRoute):
    """Permitted route that reads the key's gallery when the request begins, as GallerySnapshotRoute does.

    CompreFace ignores parameters that it does not know, and its clients send some.
    """

    allows_unknown_parameters = True

    async def before_body(self, request: Request) -> None:
        name = bound_gallery(caller_of(request))
        request.state.gallery_snapshot = await backend_of(request).find_gallery(name)


async def _bound_gallery(request: Request) -> Gallery:
    gallery: Gallery = request.state.gallery_snapshot
    return gallery


BoundGallery = Annotated[Gallery, Depends(_bound_gallery)]
"""The key's gallery as it was when the request began."""


@dataclass(frozen=True)
class Ask:
    """Request with a photo. ``gallery``: as :data:`BoundGallery`."""

    request: Request
    backend: Backend
    caller: Caller
    gallery: Gallery


async def _ask(request: Request) -> Ask:
    return Ask(request, backend_of(request), request.state.caller, request.state.gallery_snapshot)


AskDep = Annotated[Ask, Depends(_ask)]

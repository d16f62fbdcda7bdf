"""Which gallery a key stands for, and what each route requires. CompreFace's keys name one face collection each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from fastapi import Depends, Request

from service.api.http.context import context_of
from service.api.http.permissions import ENROLL, IDENTIFY, READ, Caller, Need
from service.api.http.routing import PermittedRoute, caller_of
from service.core.errors import ForbiddenError
from service.domain.gallery import Gallery

PREFIX: Final = "/api/v1"
RECOGNITION: Final = f"{PREFIX}/recognition"
FACE: Final = f"{RECOGNITION}/faces/{{image_id}}"
COMPREFACE_PERMISSIONS: Final[dict[str, Need]] = {
    f"GET {RECOGNITION}/subjects": READ,
    f"GET {RECOGNITION}/subjects/": READ,
    f"POST {RECOGNITION}/subjects": ENROLL,
    f"PUT {RECOGNITION}/subjects/{{subject}}": ENROLL,
    f"DELETE {RECOGNITION}/subjects/{{subject}}": ENROLL,
    f"DELETE {RECOGNITION}/subjects": ENROLL,
    f"GET {RECOGNITION}/faces": READ,
    f"POST {RECOGNITION}/faces": ENROLL,
    f"POST {RECOGNITION}/faces/delete": ENROLL,
    f"DELETE {RECOGNITION}/faces": ENROLL,
    f"DELETE {FACE}": ENROLL,
    f"GET {FACE}/img": READ,
    f"POST {FACE}/verify": IDENTIFY,
    f"POST {RECOGNITION}/recognize": IDENTIFY,
    f"POST {RECOGNITION}/embeddings/recognize": IDENTIFY,
    f"POST {RECOGNITION}/embeddings/faces/{{image_id}}/verify": IDENTIFY,
    f"POST {PREFIX}/detection/detect": IDENTIFY,
    f"POST {PREFIX}/verification/verify": IDENTIFY,
    f"POST {PREFIX}/verification/embeddings/verify": IDENTIFY,
}


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
    """Permitted route that reads the key's gallery when the request begins, as GallerySnapshotRoute does."""

    permissions: ClassVar[Mapping[str, Need]] = COMPREFACE_PERMISSIONS

    async def before_body(self, request: Request) -> None:
        name = bound_gallery(caller_of(request))
        request.state.gallery_snapshot = await context_of(request).find_gallery(name)


async def _bound_gallery(request: Request) -> Gallery:
    gallery: Gallery = request.state.gallery_snapshot
    return gallery


BoundGallery = Annotated[Gallery, Depends(_bound_gallery)]
"""The key's gallery as it was when the request began."""

"""Which gallery a key stands for, and what each route requires. CompreFace's keys name one face collection each."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Depends

from service.api.http.access import BackendDep, CallerDep, needs
from service.core.errors import ForbiddenError
from service.domain.gallery import Gallery
from service.security.api_keys import Caller

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


async def _bound_gallery(backend: BackendDep, caller: CallerDep) -> Gallery:
    return await backend.find_gallery(bound_gallery(caller))


BoundGallery = Annotated[Gallery, Depends(_bound_gallery)]
"""The key's gallery as it was before the body. It precedes the body in a handler's signature."""
# CompreFace ignores parameters that it does not know, and its clients send some.
IDENTIFY: Final = needs("identify", any_query=True)
READ: Final = needs("read", any_query=True)
ENROLL: Final = needs("enroll", any_query=True)

"""Routes whose modules are not written as routers yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from fastapi import APIRouter
from pydantic import BaseModel

from service.api.http.access import ADMIN, ENROLL, READ, BackendDep, CallerDep, GalleryDep, router
from service.api.http.bodies import JsonBody
from service.api.http.openapi import BINARY, PHOTO, example

__all__ = [
    "ADMIN", "BINARY", "ENROLL", "PHOTO", "READ", "BackendDep", "CallerDep", "GallerySnapshot", "GallerySnapshotRoute",
    "Routes",
]  # fmt: skip

GallerySnapshot = GalleryDep
GallerySnapshotRoute = None
Handler = TypeVar("Handler", bound=Callable[..., Any])


class Routes:
    def __init__(self, prefix: str = "", tag: str | None = None, route_class: None = None) -> None:
        self.router: APIRouter = router(prefix, tag)

    def add(
        self,
        method: str,
        path: str,
        need: Any,
        *,
        body: str | None = None,
        example: Any = None,
        errors: Any = (),
        creates_subject: bool = False,
        **options: Any,
    ) -> Callable[[Handler], Handler]:
        if example is not None:
            options["openapi_extra"] = _example(example)

        def register(handler: Handler) -> Handler:
            for name, hint in get_type_hints(handler, include_extras=True).items():
                if name != "return" and isinstance(hint, type) and issubclass(hint, BaseModel):
                    handler.__annotations__[name] = JsonBody[hint]  # type: ignore[valid-type,misc]
            return self.router.api_route(path, methods=[method], dependencies=[need], **options)(handler)

        return register


_example = example

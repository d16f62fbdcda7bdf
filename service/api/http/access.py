"""What a route needs: a scope of the key, the backend, the caller, and the gallery in its path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic.alias_generators import to_camel
from starlette.routing import BaseRoute

from kith.wire.common import Scope
from service.api.http.parameters import GalleryPath
from service.api.http.problems import RESPONSES
from service.core.errors import ForbiddenError, InvalidRequestError
from service.domain.gallery import Gallery
from service.security.callers import Caller
from service.usecases.backend import Backend
from service.usecases.documents import Document, encode_json


def router(prefix: str = "", tag: str | None = None) -> APIRouter:
    """Return a router. ``tag``: None if its routes are not in the OpenAPI document.

    The application takes its routes as they are: to FastAPI's `include_router` each path would be matched twice.
    """
    return APIRouter(
        prefix=prefix,
        tags=[tag] if tag else [],
        include_in_schema=tag is not None,
        responses=RESPONSES,
        generate_unique_id_function=lambda route: to_camel(route.name),  # the methods' names in generated clients
    )


@dataclass(frozen=True)
class Need:
    """Requirements of a route on the caller's key.

    ``scope``: None if any key is enough. ``all_galleries``: a key restricted to some galleries is rejected.
    ``any_query``: unknown query parameters are ignored.
    """

    scope: Scope | None = None
    all_galleries: bool = False
    any_query: bool = False

    def check(self, caller: Caller) -> None:
        """Raises ForbiddenError, which names the missing scope."""
        if not caller.rights.may(self.scope):
            raise ForbiddenError(f"this needs the scope {self.scope!r}", scope=self.scope)
        if self.all_galleries and caller.rights.galleries is not None:
            raise ForbiddenError("this needs a key for all galleries")

    async def admit(self, request: Request) -> None:
        """Check the request before its gallery and its body are read.

        A gallery in the path that the key is not for gives 404, whatever else is wrong with the request.
        """
        caller: Caller = request.state.caller
        self.check(caller)
        if (gallery := request.path_params.get("gallery")) is not None:
            caller.check_gallery(gallery)
        if request.query_params and not self.any_query:
            known = _query_names(request.scope["route"].dependant)
            if unknown := sorted(request.query_params.keys() - known):  # could be a filter with a typing error
                here = f"Known here: {', '.join(sorted(known))}" if known else "There are none here"
                raise InvalidRequestError(f"unknown query parameter {unknown[0]!r}. {here}")


def needs(scope: Scope | None = None, *, all_galleries: bool = False, any_query: bool = False) -> Any:
    """Return the first dependency of a route with a key: see :class:`Need`."""
    return Depends(Need(scope, all_galleries, any_query).admit)


ANY_KEY: Final = needs()
IDENTIFY: Final = needs("identify")
READ: Final = needs("read")
ENROLL: Final = needs("enroll")
ADMIN: Final = needs("admin")
READ_ALL: Final = needs("read", all_galleries=True)
ADMIN_ALL: Final = needs("admin", all_galleries=True)


def needs_of(routes: Iterable[BaseRoute]) -> dict[str, Need | None]:
    """Return what each route requires of a key, by method and path; None: it needs no key."""
    return {
        f"{method} {route.path}": next((need for need in owners(route) if isinstance(need, Need)), None)
        for route in routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }


def owners(route: APIRoute) -> list[Any]:
    """Return the objects whose methods are dependencies of a route: its need, and its body."""
    return [getattr(each.call, "__self__", None) for each in route.dependant.dependencies]


def _query_names(dependant: Dependant) -> set[str]:
    """Return the query parameters of a route. A body with a photo alone adds its options."""
    own = {parameter.alias for parameter in dependant.query_params}
    own |= getattr(getattr(dependant.call, "__self__", None), "query_names", set())
    return own.union(*(_query_names(each) for each in dependant.dependencies))


async def _backend(request: Request) -> Backend:  # async: FastAPI calls synchronous dependencies in a thread
    return cast(Backend, request.app.state.backend)


async def _caller(request: Request) -> Caller:
    return cast(Caller, request.state.caller)


BackendDep = Annotated[Backend, Depends(_backend)]
CallerDep = Annotated[Caller, Depends(_caller)]
"""The caller that the gate authenticated."""


async def _gallery(gallery: GalleryPath, backend: BackendDep) -> Gallery:
    return await backend.find_gallery(gallery)


GalleryDep = Annotated[Gallery, Depends(_gallery)]
"""The gallery in the path, as it was before the body, which may take minutes: what is erased meanwhile stays erased.

It precedes the body in a handler's signature. Raises GalleryNotFoundError.
"""


def json_response(document: Document) -> Response:
    return Response(encode_json(document), media_type="application/json")

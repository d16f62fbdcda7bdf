"""Route classes that check permissions, and read a gallery, before the body arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from kith.wire.fields import GALLERY_NAME
from service.api.http.backend import backend_of
from service.api.http.bodies import OPTIONS_FIELD, JsonRequest
from service.api.http.gate import takes_photos
from service.api.http.parameters import GalleryPath
from service.api.http.permissions import Need, description_of
from service.core.errors import GalleryNotFoundError, InvalidRequestError
from service.domain.gallery import Gallery
from service.security.callers import Caller

METHODS_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})


def caller_of(request: Request) -> Caller:
    """Return the caller that the gate authenticated."""
    return cast(Caller, request.state.caller)


async def _caller(request: Request) -> Caller:  # async: FastAPI calls synchronous dependencies in a thread
    return caller_of(request)


CallerDep = Annotated[Caller, Depends(_caller)]


class PermittedRoute(APIRoute):
    """Route that checks what its handler is `permitted` first: the body of a rejected request is never read.

    A gallery in the path that the key is not for gives 404, whatever else is wrong with the request.
    """

    allows_unknown_parameters = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Raises LookupError: the handler does not say what it requires."""
        handle, need = super().get_route_handler(), description_of(self.endpoint).need
        if need.keyless or need.keyless_on_loopback:
            return handle  # the gate has checked it
        known = _query_names(self.dependant)
        if any(takes_photos(method, self.path) for method in self.methods or ()):
            known |= {OPTIONS_FIELD}

        async def check_and_handle(request: Request) -> Response:
            caller = caller_of(request)
            need.check(caller)
            if (gallery := request.path_params.get("gallery")) is not None:
                caller.check_gallery(gallery)
            if not self.allows_unknown_parameters:
                _refuse_unknown(request, known)
            await self.before_body(request)
            return await handle(JsonRequest(request.scope, request.receive))

        return check_and_handle

    async def before_body(self, request: Request) -> None:
        """Run after the permission check and before the body is read."""


def _query_names(dependant: Dependant) -> set[str]:
    own = {parameter.alias for parameter in dependant.query_params}
    return own.union(*(_query_names(each) for each in dependant.dependencies))


def _refuse_unknown(request: Request, known: Collection[str]) -> None:
    """Raises InvalidRequestError: a query parameter is unknown; ignored, it could be a filter with a typing error."""
    if unknown := sorted(request.query_params.keys() - known):
        here = f"Known here: {', '.join(sorted(known))}" if known else "There are none here"
        raise InvalidRequestError(f"unknown query parameter {unknown[0]!r}. {here}")


def check_routes(router: APIRouter) -> APIRouter:
    """Raises LookupError: a route does not check permissions, or declares photos and would not get their limits."""
    for route in router.routes:
        if not isinstance(route, PermittedRoute):
            raise LookupError(f"{getattr(route, 'path', route)} is not a PermittedRoute")
        content = (route.openapi_extra or {}).get("requestBody", {}).get("content", {})
        if "multipart/form-data" in content and not all(takes_photos(each, route.path) for each in route.methods or ()):
            raise LookupError(
                f"{route.path} takes photos: add it to PHOTOS in service/api/http/gate.py for their limits"
            )
    return router


def needs_of(routers: Iterable[APIRouter]) -> dict[str, Need]:
    """Return what each route requires, by method and path."""
    return {
        f"{method} {route.path}": description_of(route.endpoint).need
        for router in routers
        for route in router.routes
        if isinstance(route, PermittedRoute)
        for method in route.methods or ()
    }


def keyless_paths(routers: Iterable[APIRouter], on_loopback: bool) -> frozenset[str]:
    """Return the paths that need no key."""
    needs = needs_of(routers).items()
    return frozenset(
        route.partition(" ")[2] for route, need in needs if need.keyless or (need.keyless_on_loopback and on_loopback)
    )


class GallerySnapshotRoute(PermittedRoute):
    """Permitted route that reads its gallery when the request begins. FastAPI resolves dependencies after the body.

    A body may take minutes to arrive. The snapshot tells which subjects were erased meanwhile and must stay erased.
    """

    async def before_body(self, request: Request) -> None:
        name = request.path_params["gallery"]
        if request.method in METHODS_WITH_BODY and re.match(GALLERY_NAME, name):
            with suppress(GalleryNotFoundError):  # reported after the rest of the request was validated
                request.state.gallery_snapshot = await backend_of(request).find_gallery(name)


async def _gallery_snapshot(gallery: GalleryPath, request: Request) -> Gallery:
    snapshot: Gallery | None = getattr(request.state, "gallery_snapshot", None)
    if snapshot is None:
        raise GalleryNotFoundError(f"there is no gallery {gallery!r}")
    return snapshot


GallerySnapshot = Annotated[Gallery, Depends(_gallery_snapshot)]
"""Gallery as it was when the request began, on a GallerySnapshotRoute. Raises GalleryNotFoundError."""

"""Who calls, and what a route needs: a scope of the key, the backend, and the gallery in its path."""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Header, Path
from fastapi.routing import APIRoute
from pydantic.alias_generators import to_camel
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import StreamingResponse
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from kith.wire.common import Scope as KeyScope
from service.api.http.parameters import GalleryPath
from service.api.http.problems import RESPONSES
from service.core.errors import ForbiddenError, InvalidRequestError, RefusedError, UnauthorizedError
from service.domain.gallery import Gallery
from service.security.addresses import is_loopback
from service.security.api_keys import ANONYMOUS, OPERATOR, Caller, Rights
from service.settings import Settings
from service.usecases.backend import Backend
from service.usecases.documents import Document, encode_json

INACTIVE_KEY_REMEDY: Final = "Ask the operator of the service for a new key (docs/keys.md)."
HOST_HEADER: Final = re.compile(
    r"(\[(?P<ipv6>[0-9a-f]*:[0-9a-f:.]*)\]|(?P<name>[a-z0-9.-]+))(:[0-9]{0,5})?", re.IGNORECASE
)
"""A host name, an IPv4 address or a bracketed IPv6 address, with an optional port (RFC 9110, 7.2)."""
PUBLIC: Final = frozenset({"/", "/healthz", "/readyz", "/console"})
"""Paths that need no key, like the console's files below `/console/`; their API calls do."""
# The reference is public information, but it reveals the version, which helps an attacker. A browser cannot send a key
# when it opens a page.
PUBLIC_ON_LOOPBACK: Final = ("/docs", "/openapi.json")
NOBODY: Final = Caller("anonymous", Rights(frozenset(), frozenset()))
"""Caller of paths that need no key. If such a path were routed to a route that needs one, it would be refused."""


@dataclass
class Authenticator:
    """Identify the caller of each request. Use it on the event loop only."""

    settings: Settings

    def __post_init__(self) -> None:
        settings = self.settings
        self._operator_key = settings.api_key.get_secret_value().encode() if settings.api_key else None
        self._is_on_loopback = is_loopback(settings.host)
        self._allow_anonymous = settings.allow_anonymous or self._is_on_loopback
        self._check_origin = not settings.allow_anonymous

    async def authenticate(self, request: HTTPConnection) -> Caller:
        """Return the caller of a request.

        Raises:
            UnauthorizedError: a key is required, and is missing or invalid.
            foreign_origin: no key is required, and the request came from another origin.
            StorageError, MasterKeyError: the keys cannot be read.
        """
        path: str = request.scope["path"]
        public_below = ("/console/", *(PUBLIC_ON_LOOPBACK if self._is_on_loopback else ()))
        if path in PUBLIC or path.startswith(public_below):
            return NOBODY
        backend: Backend = request.app.state.backend
        token = _read_token(request.headers)
        if self._is_operator_key(token):
            return OPERATOR
        if token is None and self._operator_key is not None:
            raise UnauthorizedError("the API key is missing")
        ring = backend.store.keys.cached_ring()
        if ring is None:
            ring = await backend.threads.run(backend.store.keys.ring)
        if token is None or (self._operator_key is None and not len(ring)):
            if len(ring) or not self._allow_anonymous:
                raise UnauthorizedError("the API key is missing")
            if self._check_origin:
                check_origin(request.headers)
            return ANONYMOUS
        key, now = ring.known(token), datetime.now(UTC)
        if key is None:
            raise UnauthorizedError("the API key is wrong")
        if (state := key.state(now)) != "active":
            raise UnauthorizedError(f"the API key is {state}", INACTIVE_KEY_REMEDY)
        backend.housekeeping.note_use(key.id, now)
        return Caller(f"key:{key.id}", key.rights)

    def _is_operator_key(self, token: str | None) -> bool:
        if token is None or self._operator_key is None:
            return False
        return hmac.compare_digest(token.encode("latin-1"), self._operator_key)


def check_origin(headers: Headers) -> None:
    """Reject requests that a web page of another origin makes a local browser send.

    A page can reach a loopback service by DNS rebinding, which shows in Host, or by CSRF, which shows in Origin.

    Raises foreign_origin.
    """
    host = headers.get("host", "")
    if not _is_loopback_host(host):
        raise RefusedError("foreign_origin", "the request is for another host than this machine's loopback address")
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
        raise RefusedError("foreign_origin", "the request was sent by a web page of another origin")


@lru_cache(maxsize=64)
def _is_loopback_host(host: str) -> bool:
    """Check that the whole header names loopback: a prefix proves nothing (``localhost:1@evil.example``)."""
    parts = HOST_HEADER.fullmatch(host)
    return parts is not None and is_loopback((parts["ipv6"] or parts["name"]).lower())


def _read_token(headers: Headers) -> str | None:
    if (token := headers.get("x-api-key")) is not None:
        return token
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


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

    scope: KeyScope | None = None
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


def needs(scope: KeyScope | None = None, *, all_galleries: bool = False, any_query: bool = False) -> Any:
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
    own = {each.alias for each in get_flat_params(dependant) if not isinstance(each.field_info, Path | Header)}
    bodies = (getattr(each.call, "__self__", None) for each in dependant.dependencies)
    return own.union(*(getattr(body, "query_names", ()) for body in bodies))


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


class EndingResponse(StreamingResponse):
    """Response that calls ``end`` afterwards, even if nothing could be sent."""

    def __init__(self, content: AsyncIterator[bytes], end: Callable[[], None], **options: Any) -> None:
        super().__init__(content, **options)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def json_response(document: Document) -> Response:
    return Response(encode_json(document), media_type="application/json")

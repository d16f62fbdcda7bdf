"""Descriptors of routes, and route classes that check permissions, and read a gallery, before the body arrives.

A route is described in one place, by the decorator of its handler: path, permission, body, response, example and own
errors. The OpenAPI document, the limits of bodies and the REST reference derive from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_args, get_type_hints

from fastapi import Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel

from kith.wire.common import Scope
from kith.wire.fields import GALLERY_NAME
from service.api.http.bodies import OPTIONS_FIELD, JsonRequest, form_options, plain_options, require_json
from service.api.http.parameters import GalleryPath
from service.api.http.route_errors import Errors, problem_responses
from service.core.errors import ForbiddenError, GalleryNotFoundError, InvalidRequestError
from service.domain.gallery import Gallery
from service.security.callers import Caller
from service.usecases.backend import Backend
from service.usecases.documents import Document, encode_json

METHODS_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
DESCRIPTION: Final = "route_description"
"""Attribute of a handler."""
BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
PHOTO: Final = "/9j/4AAQSkZJRgABAQ... (base64)"
"""Stands for a photo in examples."""
BodyKind = Literal["small", "photos", "sides", "archive", "import"]
"""Content of a body, which decides its limit. ``sides``: at most two photos."""
KindOf = Callable[[str, str], BodyKind]
"""Returns the kind of body of a method and a path. The gate needs it before routing."""
Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True)
class Need:
    """Requirements of a route on the caller's key.

    ``scope``: None if any key is enough. ``all_galleries``: a key restricted to some galleries is rejected.
    ``keyless``: no key is required. ``keyless_on_loopback``: no key is required if the service listens on loopback.
    """

    scope: Scope | None = None
    all_galleries: bool = False
    keyless: bool = False
    keyless_on_loopback: bool = False

    def check(self, caller: Caller) -> None:
        """Raises ForbiddenError, which names the missing scope."""
        if not caller.rights.may(self.scope):
            raise ForbiddenError(f"this needs the scope {self.scope!r}", scope=self.scope)
        if self.all_galleries and caller.rights.galleries is not None:
            raise ForbiddenError("this needs a key for all galleries")


PUBLIC: Final = Need(keyless=True)
# The API reference is public information, but it reveals the version, which helps an attacker. A browser cannot send a
# key when it opens a page.
PUBLIC_ON_LOOPBACK: Final = Need(keyless_on_loopback=True)
ANY_KEY: Final = Need()
IDENTIFY: Final = Need("identify")
READ: Final = Need("read")
ENROLL: Final = Need("enroll")
ADMIN: Final = Need("admin")
READ_ALL: Final = Need("read", all_galleries=True)
ADMIN_ALL: Final = Need("admin", all_galleries=True)


@dataclass(frozen=True)
class Description:
    """Properties of a route, by the decorator of its handler.

    ``photos``: model of a body with photos, which the handler reads. ``example``: of the JSON body. ``errors``: those
    that only this handler raises. ``creates_subject``: a missing subject is no error. ``takes_json``: FastAPI parses
    the body.
    """

    method: str
    path: str
    need: Need
    body: BodyKind
    photos: type[BaseModel] | None
    example: Any
    errors: Errors = ()
    creates_subject: bool = False
    takes_json: bool = False

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def needs_key(self) -> bool:
        return not (self.need.keyless or self.need.keyless_on_loopback)

    @property
    def takes_photos(self) -> bool:
        return self.body in ("photos", "sides")

    @property
    def writes(self) -> bool:
        return self.method != "GET" and self.need.scope not in ("identify", "read")


def description_of(handler: Callable[..., Any]) -> Description:
    return cast(Description, handler.__dict__[DESCRIPTION])


class Routes:
    """Routes of one resource. They are built by `mount`, once: building a route takes FastAPI milliseconds."""

    def __init__(
        self, prefix: str = "", tag: str | None = None, route_class: type[PermittedRoute] | None = None
    ) -> None:
        """``tag``: None for routes that are not in the OpenAPI document."""
        self.described: list[Description] = []
        self._prefix = prefix
        self._tag = tag
        self._class = route_class or PermittedRoute
        self._added: list[tuple[Description, Callable[..., Any], Mapping[str, Any]]] = []

    def add(
        self,
        method: str,
        path: str,
        need: Need,
        *,
        body: BodyKind | None = None,
        photos: type[BaseModel] | None = None,
        example: Any = None,
        errors: Errors = (),
        creates_subject: bool = False,
        **options: Any,
    ) -> Callable[[Handler], Handler]:
        """Describe and add a route. ``options``: as of FastAPI. Other parameters: as in :class:`Description`."""
        kind: BodyKind = body or ("photos" if photos else "small")
        described = Description(method, self._prefix + path, need, kind, photos, example, errors, creates_subject)

        def register(handler: Handler) -> Handler:
            complete = replace(described, takes_json=_has_body_parameter(handler))
            handler.__dict__[DESCRIPTION] = complete
            self.described.append(complete)
            self._added.append((complete, handler, options))
            return handler

        return register

    def mount(self, app: FastAPI) -> None:
        """Build the routes in an application. An included router would build each a second time."""
        for described, handler, given in self._added:
            options = {**given, "tags": [self._tag] if self._tag else [], "include_in_schema": self._tag is not None}
            if described.photos is not None:
                options["openapi_extra"] = _photo_body(described.photos, described.body == "sides")
            if self._tag is not None:
                options["responses"] = options.get("responses", {}) | problem_responses(described)
            app.router.add_api_route(
                described.path, handler, methods=[described.method], route_class_override=self._class, **options
            )


def _has_body_parameter(handler: Callable[..., Any]) -> bool:
    hints = get_type_hints(handler)
    hints.pop("return", None)
    kinds = [kind for hint in hints.values() for kind in (hint, *get_args(hint))]
    return any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)


def _photo_body(model: type[BaseModel], sides: bool) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that takes ``model`` as JSON or multipart.

    If its files are ``images``, it also takes one photo as the body, with the plain options in the query.
    """
    photo = BINARY["schema"]
    parts: dict[str, Any] = {"a": photo, "b": photo} if sides else {"images": {"type": "array", "items": photo}}
    parts |= form_options(model)
    parts[OPTIONS_FIELD] = {"type": "string", "description": f"The other fields of {model.__name__}, as JSON."}
    content: dict[str, Any] = {
        "application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}},
        "multipart/form-data": {"schema": {"type": "object", "properties": parts}},
    }
    body = {"requestBody": {"required": True, "content": content}}
    if sides:
        return body
    content |= {"image/*": BINARY, "application/octet-stream": BINARY}
    options = [
        {"name": name, "in": "query", "schema": schema, "description": "Only if the body is a photo."}
        for name, schema in plain_options(model).items()
    ]
    return {**body, "parameters": options}


def backend_of(request: Request) -> Backend:
    return cast(Backend, request.app.state.backend)


async def _backend(request: Request) -> Backend:  # async: FastAPI calls synchronous dependencies in a thread
    return backend_of(request)


BackendDep = Annotated[Backend, Depends(_backend)]


def caller_of(request: Request) -> Caller:
    """Return the caller that the gate authenticated."""
    return cast(Caller, request.state.caller)


async def _caller(request: Request) -> Caller:
    return caller_of(request)


CallerDep = Annotated[Caller, Depends(_caller)]


def json_response(document: Document) -> Response:
    return Response(encode_json(document), media_type="application/json")


class PermittedRoute(APIRoute):
    """Route that checks what its handler is `permitted` first: the body of a rejected request is never read.

    A gallery in the path that the key is not for gives 404, whatever else is wrong with the request.
    """

    allows_unknown_parameters = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, route = super().get_route_handler(), description_of(self.endpoint)
        need = route.need
        if need.keyless or need.keyless_on_loopback:
            return handle  # the gate has checked it
        known = _query_names(self.dependant)
        if route.photos is not None and route.body == "photos":
            known |= plain_options(route.photos).keys()

        async def check_and_handle(request: Request) -> Response:
            caller = caller_of(request)
            need.check(caller)
            if (gallery := request.path_params.get("gallery")) is not None:
                caller.check_gallery(gallery)
            if not self.allows_unknown_parameters:
                _refuse_unknown(request, known)
            if route.takes_json:
                require_json(request)
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


def descriptions(routes: Iterable[Routes]) -> list[Description]:
    return [each for some in routes for each in some.described]


def needs_of(routes: Iterable[Routes]) -> dict[str, Need]:
    """Return what each route requires, by method and path."""
    return {each.name: each.need for each in descriptions(routes)}


def keyless_paths(routes: Iterable[Routes], on_loopback: bool) -> frozenset[str]:
    """Return the paths that need no key."""
    return frozenset(
        each.path
        for each in descriptions(routes)
        if each.need.keyless or (each.need.keyless_on_loopback and on_loopback)
    )


def body_kinds(routes: Iterable[Routes]) -> KindOf:
    """Return a function of method and path."""
    patterns = [
        (each.method, re.compile(re.sub(r"{\w+}", "[^/]+", each.path)), each.body)
        for each in descriptions(routes)
        if each.body != "small"
    ]

    def kind_of(method: str, path: str) -> BodyKind:
        for of_method, pattern, kind in patterns:
            if of_method == method and pattern.fullmatch(path):
                return kind
        return "small"

    return kind_of


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

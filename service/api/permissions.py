"""Who may do what: one table. A route without a row in it cannot be made."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from service.api.json_bodies import JsonRequest
from service.errors import ForbiddenError, GalleryNotFoundError, KithError
from service.security.keys import EVERYTHING, Rights, Scope


@dataclass(frozen=True)
class Need:
    """``scope``: None for what any key may. ``all_galleries``: not for a key of some galleries. ``keyless``: no key is
    asked for; ``on_loopback``: none where the service listens on loopback alone."""

    scope: Scope | None = None
    all_galleries: bool = False
    keyless: bool = False
    on_loopback: bool = False


EVERYBODY: Final = Need(keyless=True)
# The same for each installation of a version, but which version is a beginning; and a browser cannot send a key.
READER: Final = Need(on_loopback=True)
ANY_KEY: Final = Need()
IDENTIFY: Final = Need("identify")
READ: Final = Need("read")
ENROL: Final = Need("enrol")
ADMIN: Final = Need("admin")
READ_ALL: Final = Need("read", all_galleries=True)
ADMIN_ALL: Final = Need("admin", all_galleries=True)
GALLERY: Final = "/v1/galleries/{gallery}"
SUBJECT: Final = f"{GALLERY}/subjects/{{subject}}"
TEMPLATE: Final = f"{SUBJECT}/templates/{{template}}"

CONSOLE: Final = "/console"

PERMISSIONS: Final[dict[str, Need]] = {
    "GET /": EVERYBODY,
    f"GET {CONSOLE}": EVERYBODY,  # files that are the same everywhere: what they show, they ask for with a key
    f"GET {CONSOLE}/{{file:path}}": EVERYBODY,
    "GET /healthz": EVERYBODY,
    "GET /readyz": EVERYBODY,
    "GET /docs": READER,
    "GET /docs/openapi.json": READER,
    "GET /docs/swagger-ui.css": READER,
    "GET /docs/swagger-ui-bundle.js": READER,
    "GET /openapi.json": READER,
    "GET /metrics": READ_ALL,  # it names galleries, and counts their people
    "GET /v1/status": READ_ALL,  # likewise
    "GET /v1/models": ANY_KEY,
    "POST /v1/detect": IDENTIFY,
    "POST /v1/embed": IDENTIFY,
    "POST /v1/verify": IDENTIFY,
    f"POST {GALLERY}/identify": IDENTIFY,
    "GET /v1/galleries": READ,
    "POST /v1/galleries": ADMIN_ALL,  # a name that is taken is refused, which tells that it is
    f"GET {GALLERY}": READ,
    f"PATCH {GALLERY}": ADMIN,
    f"DELETE {GALLERY}": ADMIN,
    f"GET {GALLERY}/stats": READ,
    f"GET {GALLERY}/hygiene": ADMIN,  # it compares templates, which a caller may have made up, with those of others
    f"GET {GALLERY}/retention": READ,
    f"POST {GALLERY}/retention": ADMIN,
    f"GET {GALLERY}/risk": READ,
    f"GET {GALLERY}/audit": ADMIN,
    f"POST {GALLERY}/calibrate": ADMIN,
    f"POST {GALLERY}/import": ADMIN,
    f"GET {GALLERY}/export": ADMIN,
    f"GET {GALLERY}/erasures": ADMIN,
    "GET /v1/erasures/{receipt}": ADMIN_ALL,  # also of galleries that are gone
    f"POST {GALLERY}/migrate": ADMIN,
    f"GET {GALLERY}/migrate": ADMIN,
    f"POST {GALLERY}/migrate/cut-over": ADMIN,
    f"POST {GALLERY}/migrate/roll-back": ADMIN,
    f"POST {GALLERY}/migrate/finish": ADMIN,
    f"POST {GALLERY}/enrolments": ENROL,
    f"GET {GALLERY}/subjects": READ,
    f"PUT {SUBJECT}": ENROL,
    f"GET {SUBJECT}": READ,
    f"PATCH {SUBJECT}": ENROL,
    f"DELETE {SUBJECT}": ENROL,
    f"POST {SUBJECT}/merge": ENROL,
    f"GET {SUBJECT}/export": ADMIN,
    f"GET {SUBJECT}/templates": READ,
    f"POST {SUBJECT}/templates": ENROL,
    f"GET {TEMPLATE}": READ,
    f"PATCH {TEMPLATE}": ENROL,
    f"DELETE {TEMPLATE}": ENROL,
    "GET /v1/jobs": READ,
    "GET /v1/jobs/{job}": READ,
    "GET /v1/jobs/{job}/items": READ,
    "DELETE /v1/jobs/{job}": ENROL,
    "GET /v1/audit": ADMIN_ALL,
    "GET /v1/keys": ADMIN_ALL,
    "POST /v1/keys": ADMIN_ALL,
    "GET /v1/keys/{key}": ADMIN_ALL,
    "DELETE /v1/keys/{key}": ADMIN_ALL,
    "POST /v1/keys/{key}/rotate": ADMIN_ALL,
}


def check(router: APIRouter) -> APIRouter:
    """Raises LookupError: it has a route that does not ask the table."""
    for route in router.routes:
        if not isinstance(route, Permitted):
            raise LookupError(f"{getattr(route, 'path', route)} is not a Permitted route")
    return router


def paths(chosen: Callable[[Need], bool]) -> frozenset[str]:
    return frozenset(route.partition(" ")[2] for route, need in PERMISSIONS.items() if chosen(need))


@dataclass(frozen=True)
class Caller:
    """Who sends a request. ``name``: as the audit names it (service.security.acting)."""

    name: str
    rights: Rights

    @property
    def may_export(self) -> bool:
        """Whether the caller may export templates, so that withholding similarities would protect nothing."""
        return self.rights.may("admin")

    def check(self, need: Need) -> None:
        """Raises ForbiddenError, which says what is lacking."""
        if not self.rights.may(need.scope):
            raise ForbiddenError(f"this needs the scope {need.scope!r}", scope=need.scope)
        if need.all_galleries and self.rights.galleries is not None:
            raise ForbiddenError("this needs a key for all galleries")

    def check_gallery(self, name: str) -> None:
        """Raises GalleryNotFoundError, as where there is none of the name."""
        if not self.rights.sees(name):
            raise hidden(GalleryNotFoundError(f"there is no gallery {name!r}"))


def hidden(error: KithError) -> KithError:
    """For the audit: it is said of what the caller's key is not for."""
    error.hides = True
    return error


OPERATOR: Final = Caller("operator", EVERYTHING)
ANONYMOUS: Final = Caller("anonymous", EVERYTHING)


def caller_of(request: Request) -> Caller:
    """As the gate found out."""
    return cast(Caller, request.state.caller)


async def _caller(request: Request) -> Caller:  # async, or FastAPI would call it in a thread
    return caller_of(request)


Asking = Annotated[Caller, Depends(_caller)]


class Permitted(APIRoute):
    """A route that asks the table before anything else, so that a body is read from nobody who may not send it. A
    gallery in its path that the key is not for is not there, whatever else is wrong with the request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Raises LookupError: the table has no row."""
        handle = super().get_route_handler()
        needs = [self._need(method) for method in self.methods or ()]
        if len(needs) != 1:
            raise LookupError(f"{self.path}: a route is of one method, so that the table says what it needs")
        need = needs[0]
        if need.keyless or need.on_loopback:
            return handle  # the gate's business

        async def permitted(request: Request) -> Response:
            caller = caller_of(request)
            caller.check(need)
            if (gallery := request.path_params.get("gallery")) is not None:
                caller.check_gallery(gallery)
            return await handle(JsonRequest(request.scope, request.receive))

        return permitted

    def _need(self, method: str) -> Need:
        try:
            return PERMISSIONS[f"{method} {self.path}"]
        except KeyError as error:
            raise LookupError(f"{method} {self.path} has no row in service/api/permissions.py") from error

"""Permissions: what each route requires, and what a caller may do.

A route without a row in ``PERMISSIONS`` cannot be registered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from service.core.errors import ForbiddenError, GalleryNotFoundError, KithError
from service.security.api_keys import EVERYTHING, Rights, Scope


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
GALLERY: Final = "/v1/galleries/{gallery}"
SUBJECT: Final = f"{GALLERY}/subjects/{{subject}}"
TEMPLATE: Final = f"{SUBJECT}/templates/{{template}}"
CONSOLE: Final = "/console"

PERMISSIONS: Final[dict[str, Need]] = {
    "GET /": PUBLIC,
    f"GET {CONSOLE}": PUBLIC,  # static files; their API calls need a key
    f"GET {CONSOLE}/{{file:path}}": PUBLIC,
    "GET /healthz": PUBLIC,
    "GET /readyz": PUBLIC,
    "GET /docs": PUBLIC_ON_LOOPBACK,
    "GET /docs/openapi.json": PUBLIC_ON_LOOPBACK,
    "GET /docs/swagger-ui.css": PUBLIC_ON_LOOPBACK,
    "GET /docs/swagger-ui-bundle.js": PUBLIC_ON_LOOPBACK,
    "GET /openapi.json": PUBLIC_ON_LOOPBACK,
    "GET /metrics": READ_ALL,  # names every gallery and counts its subjects
    "GET /v1/status": READ_ALL,  # names every gallery
    "GET /v1/models": ANY_KEY,
    "POST /v1/detect": IDENTIFY,
    "POST /v1/embed": IDENTIFY,
    "POST /v1/verify": IDENTIFY,
    f"POST {GALLERY}/identify": IDENTIFY,
    "GET /v1/galleries": READ,
    "POST /v1/galleries": ADMIN_ALL,  # a 409 reveals that a name is taken
    f"GET {GALLERY}": READ,
    f"PATCH {GALLERY}": ADMIN,
    f"DELETE {GALLERY}": ADMIN,
    f"GET {GALLERY}/stats": READ,
    f"GET {GALLERY}/hygiene": ADMIN,  # similarities between templates, which a caller may have made up
    f"GET {GALLERY}/retention": READ,
    f"POST {GALLERY}/retention": ADMIN,
    f"GET {GALLERY}/risk": READ,
    f"GET {GALLERY}/audit": ADMIN,
    f"POST {GALLERY}/calibrate": ADMIN,
    f"POST {GALLERY}/import": ADMIN,
    f"GET {GALLERY}/export": ADMIN,
    f"GET {GALLERY}/erasures": ADMIN,
    "GET /v1/erasures/{receipt}": ADMIN_ALL,  # includes deleted galleries
    f"POST {GALLERY}/migrate": ADMIN,
    f"GET {GALLERY}/migrate": ADMIN,
    f"POST {GALLERY}/migrate/cut-over": ADMIN,
    f"POST {GALLERY}/migrate/roll-back": ADMIN,
    f"POST {GALLERY}/migrate/finish": ADMIN,
    f"POST {GALLERY}/enrollments": ENROLL,
    f"GET {GALLERY}/subjects": READ,
    f"PUT {SUBJECT}": ENROLL,
    f"GET {SUBJECT}": READ,
    f"PATCH {SUBJECT}": ENROLL,
    f"DELETE {SUBJECT}": ENROLL,
    f"POST {SUBJECT}/merge": ENROLL,
    f"GET {SUBJECT}/export": ADMIN,
    f"GET {SUBJECT}/templates": READ,
    f"POST {SUBJECT}/templates": ENROLL,
    f"GET {TEMPLATE}": READ,
    f"GET {SUBJECT}/thumbnail": READ,
    f"GET {TEMPLATE}/crop": READ,
    f"PATCH {TEMPLATE}": ENROLL,
    f"DELETE {TEMPLATE}": ENROLL,
    "GET /v1/jobs": READ,
    "GET /v1/jobs/{job}": READ,
    "GET /v1/jobs/{job}/items": READ,
    "DELETE /v1/jobs/{job}": ENROLL,
    "GET /v1/audit": ADMIN_ALL,
    "GET /v1/keys": ADMIN_ALL,
    "POST /v1/keys": ADMIN_ALL,
    "GET /v1/keys/{key}": ADMIN_ALL,
    "DELETE /v1/keys/{key}": ADMIN_ALL,
    "POST /v1/keys/{key}/rotate": ADMIN_ALL,
    "GET /v1/webhooks": ADMIN_ALL,
    "POST /v1/webhooks": ADMIN_ALL,
    "GET /v1/webhooks/{webhook}": ADMIN_ALL,
    "DELETE /v1/webhooks/{webhook}": ADMIN_ALL,
    "POST /v1/webhooks/{webhook}/test": ADMIN_ALL,
    "GET /v1/webhooks/{webhook}/deliveries": ADMIN_ALL,
}


def paths_where(predicate: Callable[[Need], bool]) -> frozenset[str]:
    """Return the paths whose requirement satisfies ``predicate``."""
    return frozenset(route.partition(" ")[2] for route, need in PERMISSIONS.items() if predicate(need))


@dataclass(frozen=True)
class Caller:
    """Sender of a request. ``name``: as in the audit (service.core.actor)."""

    name: str
    rights: Rights

    @property
    def may_export(self) -> bool:
        """True if the caller may export templates. Withholding similarities from it would protect nothing."""
        return self.rights.may("admin")

    def check(self, need: Need) -> None:
        """Raises ForbiddenError, which names the missing scope."""
        if not self.rights.may(need.scope):
            raise ForbiddenError(f"this needs the scope {need.scope!r}", scope=need.scope)
        if need.all_galleries and self.rights.galleries is not None:
            raise ForbiddenError("this needs a key for all galleries")

    def check_gallery(self, name: str) -> None:
        """Raises GalleryNotFoundError if the key is not for the gallery, as if it did not exist."""
        if not self.rights.sees(name):
            raise mark_hidden(GalleryNotFoundError(f"there is no gallery {name!r}"))


def mark_hidden(error: KithError) -> KithError:
    """Mark a 404 that hides a resource from the caller's key, so that the audit records it."""
    error.hides_existence = True
    return error


OPERATOR: Final = Caller("operator", EVERYTHING)
ANONYMOUS: Final = Caller("anonymous", EVERYTHING)

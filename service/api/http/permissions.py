"""Permissions: what each route requires, stated beside its handler. A route without one cannot be registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kith.wire.common import Scope
from service.core.errors import ForbiddenError
from service.security.callers import Caller


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
ATTRIBUTE: Final = "route_description"
"""Attribute of a handler."""
Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True)
class Description:
    """What the decorator :func:`permitted` says about a route. ``example``: of its JSON body."""

    need: Need
    example: Any = None


def permitted(need: Need, example: Any = None) -> Callable[[Handler], Handler]:
    """Describe a route's handler: what the caller's key must permit, and an example of the JSON body."""

    def describe(handler: Handler) -> Handler:
        handler.__dict__[ATTRIBUTE] = Description(need, example)
        return handler

    return describe


def description_of(handler: Callable[..., Any]) -> Description:
    """Raises LookupError: the handler is not decorated with :func:`permitted`."""
    try:
        description: Description = handler.__dict__[ATTRIBUTE]
    except KeyError as error:
        raise LookupError(f"{handler.__module__}.{handler.__name__} needs the decorator permitted") from error
    return description

"""Typed client of the Kith server (docs/client.md): ``Kith(url, api_key)``, and ``AsyncKith`` with the same methods.

:mod:`kith.calls` describes each call once. The two classes send the calls. :mod:`kith.wire` has the models of bodies
and responses.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kith.calls import Side
    from kith.client import AsyncKith, Kith
    from kith.errors import KithClientError, KithUnreachableError
    from kith.options import Risk
    from kith.photos import Photo, Url, Vector
    from kith.requests import Archive, FileStream

__all__ = [
    "Archive",
    "AsyncKith",
    "FileStream",
    "Kith",
    "KithClientError",
    "KithUnreachableError",
    "Photo",
    "Risk",
    "Side",
    "Url",
    "Vector",
]


def __getattr__(name: str) -> Any:
    """Import a public name on demand: the server, which imports the models only, starts a tenth of a second earlier."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (import_module(f"{__name__}.{module}") for module in ("calls", "client", "errors"))
    return next(getattr(module, name) for module in modules if hasattr(module, name))

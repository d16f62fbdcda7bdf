"""Typed client of the Kith server (docs/client.md): ``Kith(url, api_key)``, and ``AsyncKith`` with the same methods.

:mod:`kith.calls` describes each call once. The two classes send the calls. :mod:`kith.wire` has the models of bodies
and responses.
"""

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

"""A typed client of the service: ``Kith(url, api_key)``, and ``AsyncKith`` with the same methods (docs/client.md).

What a method sends, and what it gives, is described once, in :mod:`service.client.calls`; the two classes only send it.
"""

from service.client.awaiting import AsyncKith
from service.client.blocking import Kith
from service.client.calls import Side
from service.client.errors import KithClientError, KithUnreachableError
from service.client.photos import Photo, Url, Vector
from service.client.requests import Archive, FileStream

__all__ = [
    "Archive",
    "AsyncKith",
    "FileStream",
    "Kith",
    "KithClientError",
    "KithUnreachableError",
    "Photo",
    "Side",
    "Url",
    "Vector",
]

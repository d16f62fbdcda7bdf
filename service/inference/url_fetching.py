"""Photos fetched by URL, protected against server-side request forgery (service.security.outbound_http).

The error of a refused URL does not reveal whether the host exists.
"""

from __future__ import annotations

import asyncio
from typing import Final

import httpx2 as httpx

from service.core.deadlines import FairSemaphore, in_time
from service.core.errors import ImageError
from service.security.outbound_http import MAX_CONCURRENT, NotConnectedError, OutboundHttp, TargetRefusedError

DEFAULT_TIMEOUT_S: Final = 10.0
"""Timeout of one photo: name resolution, connections, redirects and transfer."""
MAX_REDIRECTS: Final = 3
CONTENT_TYPES: Final = ("image/", "application/octet-stream", "binary/octet-stream")
HEADERS: Final = {
    "User-Agent": "kith",
    "Accept": "image/*, application/octet-stream;q=0.5",
    # No compression, so that the byte limit applies to what is received.
    "Accept-Encoding": "identity",
    "Connection": "close",
}


class UrlFetcher:
    """Fetcher of photos of at most ``max_bytes``."""

    def __init__(self, http: OutboundHttp, max_bytes: int, total_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._http = http
        self._max_bytes = max_bytes
        self._total_s = total_s
        self._places = FairSemaphore(MAX_CONCURRENT)

    async def fetch(self, url: str) -> bytes:
        """Return the bytes at ``url``.

        Raises:
            url_refused: The URL is not allowed; no connection was made to it.
            url_failed: The URL returned no photo.
            image_too_large: The photo exceeds ``max_bytes``; the rest was not read.
            DeadlineExceededError, ClientGoneError: The request has ended.
        """
        async with self._places, in_time():
            try:
                async with asyncio.timeout(self._total_s):
                    return await self._follow(self._http.target(url))
            except (TargetRefusedError, httpx.InvalidURL, ValueError) as error:
                raise ImageError("url_refused", "photos from this URL are not allowed") from error
            except NotConnectedError as error:
                raise ImageError("url_failed", "no connection could be made") from error
            except httpx.TransportError as error:
                raise ImageError("url_failed", "the connection broke") from error
            except TimeoutError as error:
                raise ImageError("url_failed", f"the photo did not arrive within {self._total_s:g} s") from error

    async def _follow(self, url: httpx.URL) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            async with self._http.request("GET", url, HEADERS, self._total_s) as response:
                if not response.has_redirect_location:
                    return await self._read(response)
                url = self._http.target(str(url.join(response.headers["location"])))
        raise ImageError("url_failed", f"the URL redirects more than {MAX_REDIRECTS} times")

    async def _read(self, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            raise ImageError("url_failed", f"the URL returned status {response.status_code}")
        if not response.headers.get("content-type", "").lower().startswith(CONTENT_TYPES):
            raise ImageError("url_failed", "the content type of the response is not a photo")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise ImageError("url_failed", "the response is compressed, which was not requested")
        pieces, received = list[bytes](), 0
        async for piece in response.aiter_raw():
            received += len(piece)
            if received > self._max_bytes:
                raise ImageError("image_too_large", f"the photo has more than {self._max_bytes} bytes, the limit")
            pieces.append(piece)
        return b"".join(pieces)

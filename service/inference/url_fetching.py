"""Photos fetched by URL, protected against server-side request forgery (SSRF).

The host name is resolved and checked before a socket is opened, and the connection goes to the checked address. The
error of a refused URL does not reveal whether the host exists.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

import httpx2 as httpx

from service.core import deadlines
from service.core.deadlines import FairSemaphore
from service.core.photo_errors import ImageTooLargeError, UrlFailedError, UrlRefusedError
from service.security.addresses import Address, Hosts, host_name, is_public, parsed

MAX_CONCURRENT_FETCHES: Final = 16
"""Concurrent fetches; others wait."""
DEFAULT_TIMEOUT_S: Final = 10.0
"""Timeout of one photo: name resolution, connections, redirects and transfer."""
MAX_REDIRECTS: Final = 3
MAX_ADDRESSES: Final = 3
"""Addresses of a host that are tried in sequence."""
MAX_URL_LENGTH: Final = 2048
PORTS: Final = frozenset({80, 443})
CONTENT_TYPES: Final = ("image/", "application/octet-stream", "binary/octet-stream")
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
HEADERS: Final = {
    "User-Agent": "kith",
    "Accept": "image/*, application/octet-stream;q=0.5",
    # No compression, so that the byte limit applies to what is received.
    "Accept-Encoding": "identity",
    "Connection": "close",
}

Resolve = Callable[[str], Awaitable[Collection[str]]]
"""Resolver from a host name to its addresses. Raises OSError."""


class UrlFetcher:
    """Fetcher of photos. Use as a context manager in the event loop that fetches.

    Args:
        hosts: Allowed hosts.
        max_bytes: Limit of a photo.
        http: Allow http in addition to https.
        resolve: Resolver, by default the system's.
        permits, ports, verify: Address check, ports and TLS context, for tests on loopback.
    """

    def __init__(
        self,
        hosts: Hosts,
        max_bytes: int,
        http: bool = False,
        resolve: Resolve | None = None,
        permits: Callable[[Address], bool] = is_public,
        ports: Collection[int] = PORTS,
        verify: ssl.SSLContext | None = None,
        total_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._schemes = {"https": 443, "http": 80} if http else {"https": 443}
        self._resolve = resolve or self._ask_system
        self._permits = permits
        self._ports = ports
        self._total_s = total_s
        self._verify = verify
        self._places = FairSemaphore(MAX_CONCURRENT_FETCHES)
        # A separate pool, so that slow DNS lookups do not block other users of threads.
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_FETCHES, thread_name_prefix="names")
        self._opened: httpx.AsyncHTTPTransport | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._opened is not None:
            await self._opened.aclose()

    async def fetch(self, url: str) -> bytes:
        """Return the bytes at ``url``.

        Raises:
            UrlRefusedError: The URL is not allowed; no connection was made to it.
            UrlFailedError: The URL returned no photo.
            ImageTooLargeError: The photo exceeds ``max_bytes``; the rest was not read.
            DeadlineExceededError, ClientGoneError: The request has ended.
        """
        target = self._target(url)
        async with self._places:
            work = asyncio.create_task(self._follow(target))
            ended = asyncio.get_running_loop().create_future()
            try:
                if (deadline := deadlines.current_deadline()) is not None:
                    deadline.bind(ended)
                await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    ended.result()
                return await work
            finally:
                work.cancel()
                ended.cancel()
                await asyncio.gather(work, return_exceptions=True)

    def _target(self, text: str) -> httpx.URL:
        """Return the normalized URL if it is allowed. Raises UrlRefusedError."""
        if not self._hosts.patterns:
            raise UrlRefusedError("fetching photos by URL is disabled")
        try:
            # Parsers disagree on these characters, and could see another host.
            if len(text) > MAX_URL_LENGTH or "\\" in text or not text.isprintable() or " " in text:
                raise _refused()
            url = httpx.URL(text)
            host = host_name(_ascii_host(url))
        except (httpx.InvalidURL, ValueError) as error:
            raise _refused() from error
        if url.scheme not in self._schemes or url.userinfo or host is None or not self._hosts.allow(host):
            raise _refused()
        if (self._schemes[url.scheme] if url.port is None else url.port) not in self._ports:
            raise _refused()
        return url.copy_with(host=host)

    async def _follow(self, url: httpx.URL) -> bytes:
        try:
            async with asyncio.timeout(self._total_s):
                for _ in range(1 + MAX_REDIRECTS):
                    answer = await self._get(url)
                    if isinstance(answer, bytes):
                        return answer
                    url = self._target(str(answer))
        except TimeoutError as error:
            raise UrlFailedError(f"the photo did not arrive within {self._total_s:g} s") from error
        raise UrlFailedError(f"the URL redirects more than {MAX_REDIRECTS} times")

    async def _get(self, url: httpx.URL) -> bytes | httpx.URL:
        """Return the photo, or the target of a redirect."""
        name = _ascii_host(url)
        for address in await self._addresses(name):
            request = httpx.Request(
                "GET",
                # The checked address, which is not resolved again (DNS rebinding).
                url.copy_with(host=str(address)),
                headers={**HEADERS, "Host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": name, "timeout": httpx.Timeout(self._total_s).as_dict()},
            )
            try:
                response = await self._transport().handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except (httpx.TransportError, httpx.InvalidURL) as error:
                raise UrlFailedError("the connection broke") from error
            try:
                return await self._read(url, response)
            except httpx.TransportError as error:
                raise UrlFailedError("the connection broke") from error
            finally:
                await response.aclose()
        raise UrlFailedError("no connection could be made")

    async def _addresses(self, host: str) -> list[Address]:
        """Return the addresses of a host if all are public.

        Raises:
            UrlRefusedError: An address is not public, or the host does not exist. One error for both, so that callers
                cannot probe which internal names exist.
        """
        try:
            found = [parsed(text) for text in await self._resolve(host)]
        except (OSError, UnicodeError) as error:
            raise _refused() from error
        addresses = [address for address in found if address is not None and self._permits(address)]
        if not addresses or len(addresses) != len(found):
            raise _refused()
        return addresses[:MAX_ADDRESSES]

    async def _ask_system(self, host: str) -> Collection[str]:
        # The trailing dot disables search domains, which would resolve another name.
        loop, name = asyncio.get_running_loop(), f"{host}."
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        )
        return dict.fromkeys(str(entry[4][0]) for entry in found)

    def _transport(self) -> httpx.AsyncHTTPTransport:
        """Return the bare transport: no cookies, credentials, automatic redirects or proxies of the environment.

        Connections are not reused: pooled by address, one could serve another host without a check of its certificate.
        """
        if self._opened is None:
            self._opened = httpx.AsyncHTTPTransport(
                verify=True if self._verify is None else self._verify,
                limits=httpx.Limits(max_connections=MAX_CONCURRENT_FETCHES, max_keepalive_connections=0),
            )
        return self._opened

    async def _read(self, url: httpx.URL, response: httpx.Response) -> bytes | httpx.URL:
        if response.status_code in REDIRECTS and "location" in response.headers:
            try:
                return url.join(response.headers["location"])
            except (httpx.InvalidURL, ValueError) as error:
                raise _refused() from error
        if response.status_code != 200:
            raise UrlFailedError(f"the URL returned status {response.status_code}")
        if not response.headers.get("content-type", "").lower().startswith(CONTENT_TYPES):
            raise UrlFailedError("the content type of the response is not a photo")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise UrlFailedError("the response is compressed, which was not requested")
        declared = response.headers.get("content-length", "0")
        if declared.isdigit() and int(declared[:18]) > self._max_bytes:
            raise self._too_large()
        pieces, received = list[bytes](), 0
        async for piece in response.aiter_raw():
            received += len(piece)
            if received > self._max_bytes:
                raise self._too_large()
            pieces.append(piece)
        return b"".join(pieces)

    def _too_large(self) -> ImageTooLargeError:
        return ImageTooLargeError(f"the photo has more than {self._max_bytes} bytes, the limit")


def _ascii_host(url: httpx.URL) -> str:
    """Return the host in ASCII (IDNA)."""
    return url.raw_host.decode("ascii")


def _refused() -> UrlRefusedError:
    return UrlRefusedError("photos from this URL are not allowed")

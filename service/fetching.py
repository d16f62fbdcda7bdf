"""Photos fetched by URL, from nowhere but where they may be: what an address means is decided before a socket is
opened, and the connection goes to the very address that was looked at.

A client that is refused is told the same whatever there is, or is not, behind the name.
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

from service import patience
from service.errors import ImageTooLargeError, UrlFailedError, UrlRefusedError
from service.patience import Places
from service.security.addresses import Address, Hosts, host_name, is_public, parsed

AT_ONCE: Final = 16
"""Photos being fetched; others wait for their turn."""
TOTAL_S: Final = 10.0
"""For one photo: names, connections, redirects and all its bytes."""
MOST_REDIRECTS: Final = 3
MOST_ADDRESSES: Final = 3
"""Of a host, tried one after the other."""
LONGEST_URL: Final = 2048
PORTS: Final = frozenset({80, 443})
TYPES: Final = ("image/", "application/octet-stream", "binary/octet-stream")
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
HEADERS: Final = {
    "User-Agent": "kith",
    "Accept": "image/*, application/octet-stream;q=0.5",
    # What is sent is what is counted: nothing is to unfold here.
    "Accept-Encoding": "identity",
    "Connection": "close",
}

Resolve = Callable[[str], Awaitable[Collection[str]]]
"""A host's full name to its addresses. Raises OSError."""


class Fetcher:
    """Use as a context manager, in the event loop that fetches.

    Args:
        hosts: whose photos are fetched.
        max_bytes: of a photo.
        http: whether http is as good as https.
        resolve: default: the system's.
        permits, ports, verify: what tests must be able to say, who have nothing but loopback.
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
        total_s: float = TOTAL_S,
    ) -> None:
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._schemes = {"https": 443, "http": 80} if http else {"https": 443}
        self._resolve = resolve or self._ask_system
        self._permits = permits
        self._ports = ports
        self._total_s = total_s
        self._verify = verify
        self._places = Places(AT_ONCE)
        # Of its own: names that nobody answers for must not hold up whoever else needs a thread.
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="names")
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
        """The bytes at ``url``, for as long as whoever asked waits.

        Raises:
            UrlRefusedError: photos are not fetched from there; no connection was made to it.
            UrlFailedError: it did not give a photo.
            ImageTooLargeError: it has more bytes than a photo may; what is too many is not read.
            DeadlineExceededError, ClientGoneError: nobody waits any more.
        """
        target = self._target(url)
        async with self._places:
            work = asyncio.create_task(self._follow(target))
            ended = asyncio.get_running_loop().create_future()
            try:
                if (asking := patience.current()) is not None:
                    asking.hold(ended)
                await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    ended.result()
                return await work
            finally:
                work.cancel()
                ended.cancel()
                await asyncio.gather(work, return_exceptions=True)

    def _target(self, text: str) -> httpx.URL:
        """Raises UrlRefusedError."""
        if not self._hosts.patterns:
            raise UrlRefusedError("this server fetches no photos")
        try:
            # Characters that parsers disagree on.
            if len(text) > LONGEST_URL or "\\" in text or not text.isprintable() or " " in text:
                raise _refused()
            url = httpx.URL(text)
            host = host_name(_name_of(url))
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
                for _ in range(1 + MOST_REDIRECTS):
                    answer = await self._get(url)
                    if isinstance(answer, bytes):
                        return answer
                    url = self._target(str(answer))
        except TimeoutError as error:
            raise UrlFailedError(f"the photo did not arrive within {self._total_s:g} s") from error
        raise UrlFailedError(f"the address leads to another more than {MOST_REDIRECTS} times")

    async def _get(self, url: httpx.URL) -> bytes | httpx.URL:
        """A photo, or where it is instead."""
        name = _name_of(url)
        for address in await self._addresses(name):
            request = httpx.Request(
                "GET",
                # An address, of which no name is made again.
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
        """All a name has, if all are public: of a name that has one of each, somebody would choose.

        Raises UrlRefusedError: also where there is no such name, or it would tell which names exist in here.
        """
        try:
            found = [parsed(text) for text in await self._resolve(host)]
        except (OSError, UnicodeError) as error:
            raise _refused() from error
        addresses = [address for address in found if address is not None and self._permits(address)]
        if not addresses or len(addresses) != len(found):
            raise _refused()
        return addresses[:MOST_ADDRESSES]

    async def _ask_system(self, host: str) -> Collection[str]:
        # The dot keeps search domains away, which would make another name of it.
        loop, name = asyncio.get_running_loop(), f"{host}."
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        )
        return dict.fromkeys(str(entry[4][0]) for entry in found)

    def _transport(self) -> httpx.AsyncHTTPTransport:
        """Of a client it lacks cookies, credentials, redirects and the environment's proxies. No connection is kept: by
        its address it would serve another name, which its certificate was not asked for."""
        if self._opened is None:
            self._opened = httpx.AsyncHTTPTransport(
                verify=True if self._verify is None else self._verify,
                limits=httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0),
            )
        return self._opened

    async def _read(self, url: httpx.URL, response: httpx.Response) -> bytes | httpx.URL:
        if response.status_code in REDIRECTS and "location" in response.headers:
            try:
                return url.join(response.headers["location"])
            except (httpx.InvalidURL, ValueError) as error:
                raise _refused() from error
        if response.status_code != 200:
            raise UrlFailedError(f"the address answered {response.status_code}")
        if not response.headers.get("content-type", "").lower().startswith(TYPES):
            raise UrlFailedError("what the address answered with does not call itself a photo")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise UrlFailedError("the photo was sent compressed, which was not asked for")
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


def _name_of(url: httpx.URL) -> str:
    """In ASCII, as it is asked for."""
    return url.raw_host.decode("ascii")


def _refused() -> UrlRefusedError:
    return UrlRefusedError("photos are not fetched from this address")

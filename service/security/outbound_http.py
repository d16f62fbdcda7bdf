"""HTTP requests to addresses that callers choose, protected against server-side request forgery (SSRF).

The host name is resolved and checked before a socket is opened, and the connection goes to the checked address.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, Self

import httpx2 as httpx

from service.security.addresses import Address, Hosts, host_name, is_public, parsed

MAX_CONCURRENT: Final = 16
"""Concurrent connections and lookups of names."""
MAX_ADDRESSES: Final = 3
"""Addresses of a host that are tried in sequence."""
PORTS: Final = frozenset({443})
TRANSPORT_ERRORS: Final = (httpx.TransportError, httpx.InvalidURL)

Resolve = Callable[[str], Awaitable[Collection[str]]]
"""Resolver from a host name to its addresses. Raises OSError."""


class TargetRefusedError(Exception):
    """A URL is not allowed. No connection was made, and nothing reveals whether its host exists."""


class NotConnectedError(Exception):
    """No address of the host accepted a connection."""


class OutboundHttp:
    """HTTP client. Use as a context manager in the event loop that sends.

    Args:
        hosts: Allowed hosts with public addresses, on ``ports``.
        origins: Scheme, host and port, as ``http://10.0.0.5:8123``, allowed as they are, whatever their address.
        resolve: Resolver, by default the system's.
        http, permits, ports, verify: http beside https, address check, ports and TLS context, for tests on loopback.
    """

    def __init__(
        self,
        hosts: Hosts,
        http: bool = False,
        origins: Collection[str] = (),
        resolve: Resolve | None = None,
        permits: Callable[[Address], bool] = is_public,
        ports: Collection[int] = PORTS,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = hosts
        self._schemes = {"https": 443, "http": 80} if http else {"https": 443}
        self._origins = frozenset(origins)
        self._resolve = resolve or self._ask_system
        self._permits = permits
        self._ports = ports
        self._verify = verify
        # A separate pool, so that slow DNS lookups do not block other users of threads.
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="names")
        self._opened: httpx.AsyncHTTPTransport | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._opened is not None:
            await self._opened.aclose()

    def target(self, text: str) -> httpx.URL:
        """Return the normalized URL if it is allowed. Raises TargetRefusedError."""
        try:
            url = httpx.URL(text)
            if url.userinfo or "\\" in text:  # browsers read a backslash as a slash, and could see another host
                raise TargetRefusedError
            if _origin(url) in self._origins:
                return url
            host = host_name(_ascii_host(url))
        except (httpx.InvalidURL, ValueError) as error:
            raise TargetRefusedError from error
        if url.scheme not in self._schemes or host is None or not self._hosts.allow(host):
            raise TargetRefusedError
        if (self._schemes[url.scheme] if url.port is None else url.port) not in self._ports:
            raise TargetRefusedError
        return url.copy_with(host=host)

    @asynccontextmanager
    async def request(
        self, method: str, url: httpx.URL, headers: Mapping[str, str], timeout_s: float, content: bytes | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request to a URL of :meth:`target`; the response's body is unread.

        Raises:
            TargetRefusedError: An address is not public, or the host does not exist.
            NotConnectedError: No connection could be made.
            TRANSPORT_ERRORS: The connection broke.
        """
        name = _ascii_host(url)
        for address in await self._addresses(name, trusted=_origin(url) in self._origins):
            request = httpx.Request(
                method,
                # The checked address, which is not resolved again (DNS rebinding).
                url.copy_with(host=str(address)),
                headers={**headers, "Host": url.netloc.decode("ascii")},
                content=content,
                extensions={"sni_hostname": name, "timeout": httpx.Timeout(timeout_s).as_dict()},
            )
            try:
                response = await self._transport().handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            try:
                yield response
            finally:
                await response.aclose()
            return
        raise NotConnectedError

    async def _addresses(self, host: str, trusted: bool) -> list[Address]:
        """Return the addresses of a host if all are public, or if it is trusted.

        Raises:
            TargetRefusedError: An address is not public, or the host does not exist. One error for both, so that
                callers cannot probe which internal names exist.
        """
        if trusted and (literal := parsed(host.strip("[]"))) is not None:
            return [literal]
        try:
            asked = self._ask_system(host, search=True) if trusted else self._resolve(host)
            found = [parsed(text) for text in await asked]
        except (OSError, UnicodeError) as error:
            raise TargetRefusedError from error
        addresses = [address for address in found if address is not None and (trusted or self._permits(address))]
        if not addresses or len(addresses) != len(found):
            raise TargetRefusedError
        return addresses[:MAX_ADDRESSES]

    async def _ask_system(self, host: str, search: bool = False) -> Collection[str]:
        # The trailing dot disables search domains, which would resolve another name.
        loop, name = asyncio.get_running_loop(), host if search else f"{host}."
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
                limits=httpx.Limits(max_connections=MAX_CONCURRENT, max_keepalive_connections=0),
            )
        return self._opened


def _ascii_host(url: httpx.URL) -> str:
    """Return the host in ASCII (IDNA)."""
    return url.raw_host.decode("ascii")


def _origin(url: httpx.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode('ascii')}"

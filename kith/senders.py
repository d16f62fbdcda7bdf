"""Sending of calls with retries, in threads or in an event loop: twins that differ in ``await`` only."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from itertools import count
from typing import Any, ClassVar, Final, Self, TypeVar

import httpx2 as httpx

from kith.errors import KithClientError, KithUnreachableError, local_error, unknown_response_error
from kith.requests import LAST_EVENT_ID, Call, Pages
from kith.retries import backoff_s, retry_s
from kith.wire.fields import Page

Result = TypeVar("Result")
KEY_VARIABLES: Final = ("KITH_CLIENT_KEY", "KITH_API_KEY")
"""Environment variables of the API key, the first that is set. The second is the server's own key."""
HTTP_VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that httpx reads; proxy variables also in lower case."""


class Connection:
    """HTTP client of the type ``_kind``, and what both senders do without waiting.

    It uses the environment's proxies, except for the local machine: such a request holds a key and photos, and a remote
    proxy could not reach its destination.

    Raises:
        KithClientError: the address, the key, or the environment's proxy or certificates are unusable. The message
            omits their values, which may contain a password.
    """

    _kind: ClassVar[Callable[..., Any]]
    _http: Any

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        attempts: int = 4,
        connections: int = 32,
    ) -> None:
        self._attempts = attempts
        # Waiting for a free connection of the pool has no timeout, because the server is not at fault.
        self._timeout = httpx.Timeout(timeout_s, pool=None)
        self._patience = httpx.Timeout(timeout_s, read=None, pool=None)
        address, headers = parse_url(url), build_headers(api_key)
        local = is_loopback(address.host)
        try:
            self._http = self._kind(
                base_url=address,
                headers=headers,
                timeout=self._timeout,
                limits=httpx.Limits(max_connections=connections),
                trust_env=not local,
                verify=httpx.create_ssl_context() if local and address.scheme == "https" else True,
            )
        except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
            raise local_error(
                "invalid_environment",
                f"the environment's proxy or certificates cannot be used ({type(error).__name__})",
                f"Correct or unset {', '.join(HTTP_VARIABLES)}.",
            ) from None

    def _request(self, call: Call[Any], body: object = None) -> httpx.Request:
        """Build a request. ``body``: what the call streams.

        Raises KithClientError: JSON or a URL cannot represent a value."""
        arguments = {"timeout": self._patience if call.long_running else self._timeout, **call.arguments}
        if body is not None:
            arguments["content"] = body
        try:
            request: httpx.Request = self._http.build_request(call.method, call.path, **arguments)
        except ValueError as error:  # NaN, infinity, or an unpaired surrogate
            raise local_error(
                "invalid_request",
                f"the request cannot be encoded as JSON or a URL: {error}",
                "Use finite numbers and valid Unicode text.",
            ) from None
        return request


class Sender(Connection):
    """Send calls and retry failed ones."""

    _kind = httpx.Client
    _http: httpx.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _describe_and_send(self, describe: Callable[[], Call[Result]]) -> Result:
        return self._send(describe())

    def _send(self, call: Call[Result]) -> Result:
        try:
            response = self._open(call)
        except KithClientError as error:
            if error.code not in call.instead:
                raise
            return self._send(call.instead[error.code])
        with reading(response):
            return call.parse(response.content)

    def _open(self, call: Call[Any], stream: bool = False, attempts: float = 0) -> httpx.Response:
        """Send a call until the server accepts it; with ``stream``, the caller reads and closes the response.

        Raises KithClientError, KithUnreachableError after ``attempts``, by default those of the client.
        """
        for attempt in count():
            request = self._request(call, call.stream)
            try:
                response = self._http.send(request, stream=True)
                if not (stream and response.is_success):
                    with closing(response), decoding(response):
                        response.read()
                if response.is_success:
                    return response
                failure: httpx.Response | httpx.TransportError = response
            except httpx.TransportError as error:
                failure = error
            time.sleep(retry_s(call, attempt, attempts or self._attempts, failure))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _list(self, pages: Pages[Result]) -> Iterator[Result]:
        """Ask for the first page at once, so that errors are raised where the list is asked for."""
        return self._items(pages, self._send(pages.page(None)))

    def _items(self, pages: Pages[Result], page: Page[Result]) -> Iterator[Result]:
        yield from page.data
        while page.next is not None:
            page = self._send(pages.page(page.next))
            yield from page.data

    def _stream(self, call: Call[Result]) -> Generator[Result, None, None]:
        """Stream a response. Once it has begun there is no retry: the caller would get those bytes twice."""
        with closing(self._open(call, stream=True)) as response, reading(response):
            yield from map(call.parse, response.iter_bytes())

    def _follow(self, call: Call[Result]) -> Generator[Result, None, None]:
        """Yield events without end. A broken connection is opened again, with the id of the last event.

        Before the first response, errors are raised after the usual attempts; later, only those that last.
        """
        attempts: float = self._attempts
        while True:
            response = self._open(call, stream=True, attempts=attempts)
            attempts = math.inf
            with suppress(KithUnreachableError), closing(response), reading(response):
                for event in httpx.EventSource(response):
                    call = resumed(call, event)
                    if event.data:
                        yield call.parse(event)
            time.sleep(backoff_s(0))


class AsyncSender(Connection):
    """Send calls and retry failed ones. Files are read and images encoded in threads, not in the event loop."""

    _kind = httpx.AsyncClient
    _http: httpx.AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _describe_and_send(self, describe: Callable[[], Call[Result]]) -> Result:
        return await self._send(await asyncio.to_thread(describe))

    async def _send(self, call: Call[Result]) -> Result:
        try:
            response = await self._open(call)
        except KithClientError as error:
            if error.code not in call.instead:
                raise
            return await self._send(call.instead[error.code])
        with reading(response):
            return call.parse(response.content)

    async def _open(self, call: Call[Any], stream: bool = False, attempts: float = 0) -> httpx.Response:
        """Send a call until the server accepts it; with ``stream``, the caller reads and closes the response.

        Raises KithClientError, KithUnreachableError after ``attempts``, by default those of the client.
        """
        for attempt in count():
            request = self._request(call, None if call.stream is None else _read(call.stream))
            try:
                response = await self._http.send(request, stream=True)
                if not (stream and response.is_success):
                    async with aclosing(response):
                        with decoding(response):
                            await response.aread()
                if response.is_success:
                    return response
                failure: httpx.Response | httpx.TransportError = response
            except httpx.TransportError as error:
                failure = error
            await asyncio.sleep(retry_s(call, attempt, attempts or self._attempts, failure))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _list(self, pages: Pages[Result]) -> AsyncIterator[Result]:
        page = Page[Result](data=[], next="")
        while page.next is not None:
            page = await self._send(pages.page(page.next or None))
            for item in page.data:
                yield item

    async def _stream(self, call: Call[Result]) -> AsyncGenerator[Result, None]:
        """Stream a response. Once it has begun there is no retry: the caller would get those bytes twice."""
        async with aclosing(await self._open(call, stream=True)) as response:
            with reading(response):
                async for chunk in response.aiter_bytes():
                    yield call.parse(chunk)

    async def _follow(self, call: Call[Result]) -> AsyncGenerator[Result, None]:
        """Yield events without end. A broken connection is opened again, with the id of the last event.

        Before the first response, errors are raised after the usual attempts; later, only those that last.
        """
        attempts: float = self._attempts
        while True:
            response = await self._open(call, stream=True, attempts=attempts)
            attempts = math.inf
            async with aclosing(response):
                with suppress(KithUnreachableError), reading(response):
                    async for event in httpx.EventSource(response):
                        call = resumed(call, event)
                        if event.data:
                            yield call.parse(event)
            await asyncio.sleep(backoff_s(0))


async def _read(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(chunks)
    while (chunk := await asyncio.to_thread(next, iterator, None)) is not None:
        yield chunk


def build_headers(api_key: str | None) -> dict[str, str]:
    """Return the authorization header. None: the key of KITH_CLIENT_KEY, or else of KITH_API_KEY; "": no key.

    Raise KithClientError, without the key, if a header cannot carry it."""
    if api_key is None:
        api_key = next(filter(None, map(os.environ.get, KEY_VARIABLES)), "")
    key = api_key.rstrip("\r\n")  # a key read from a file may end with a line break
    if not (key.isascii() and key.isprintable()):
        raise local_error(
            "invalid_key", "the API key has invalid characters", "Copy the key again, without spaces or line breaks."
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def parse_url(url: str | None) -> httpx.URL:
    """Parse the server's URL, by default that of KITH_URL.

    Raise KithClientError without the URL, which may contain a password."""
    if not (given := os.environ.get("KITH_URL") if url is None else url):
        raise local_error(
            "invalid_address", "the client has no address of a server", "Pass the server's address, or set KITH_URL."
        )
    with suppress(httpx.InvalidURL, UnicodeError):
        address = httpx.URL(given)
        if address.scheme in ("http", "https") and address.host and not (address.query or address.fragment):
            return address
    raise local_error(
        "invalid_address",
        "the server's address is invalid",
        "Use an address such as http://127.0.0.1:8000 or https://example.org/kith, without a query or fragment.",
    )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is the local machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def resumed(call: Call[Result], event: httpx.ServerSentEvent) -> Call[Result]:
    """Return the call of a stream that continues after an event."""
    return replace(call, arguments={**call.arguments, "headers": {LAST_EVENT_ID: event.id}}) if event.id else call


@contextmanager
def decoding(response: httpx.Response) -> Iterator[None]:
    """Raise KithClientError if another program than Kith sent the response."""
    try:
        yield
    except (httpx.DecodingError, httpx.SSEError, TypeError, ValueError, RecursionError):  # pydantic's are ValueErrors
        raise unknown_response_error(response.status_code) from None


@contextmanager
def reading(response: httpx.Response) -> Iterator[None]:
    """Raise KithClientError for what interrupts the reading of a response, or if another program than Kith sent it."""
    try:
        with decoding(response):
            yield
    except httpx.TransportError as error:
        raise KithUnreachableError(error) from error

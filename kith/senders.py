"""Sending of calls with retries, in threads or in an event loop: twins that differ in ``await`` only."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from itertools import count
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar

import httpx2 as httpx

from kith.errors import KithClientError, KithUnreachableError, unknown_response_error
from kith.requests import LAST_EVENT_ID, Call, Pages
from kith.retries import backoff_s, retry_s
from kith.transport import build_arguments, open_http, parse_event, parse_response, reading, resumed

Result = TypeVar("Result")
TIMEOUT_S: Final = 60.0
ATTEMPTS: Final = 4
CONNECTIONS: Final = 32


class Connection:
    """HTTP client of a sender, of the type ``_kind``."""

    _kind: ClassVar[Callable[..., Any]]
    _http: Any

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        attempts: int = ATTEMPTS,
        connections: int = CONNECTIONS,
    ) -> None:
        self._attempts, self._timeout_s = attempts, timeout_s
        self._http = open_http(self._kind, url, api_key, timeout_s, attempts, connections)


class Sender(Connection):
    """Send calls and retry failed ones."""

    _kind = httpx.Client
    _http: httpx.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _send(self, call: Call[Result]) -> Result:
        try:
            return parse_response(call, self._open(call))
        except KithClientError as error:
            if error.code not in call.instead:
                raise
            return self._send(call.instead[error.code])

    def _open(self, call: Call[object], stream: bool = False, attempts: float = 0) -> httpx.Response:
        """Send a call until the server accepts it; with ``stream``, the caller reads and closes the response.

        Raises KithClientError, KithUnreachableError after ``attempts``, by default those of the client.
        """
        for attempt in count():
            arguments = build_arguments(call, self._timeout_s)
            if call.stream is not None:
                arguments["content"] = call.stream
            try:
                response = self._http.send(self._http.build_request(**arguments), stream=True)
                if not (stream and response.is_success):
                    with closing(response):
                        response.read()
            except httpx.DecodingError:
                raise unknown_response_error(response.status_code) from None
            except httpx.TransportError as error:
                failure: httpx.Response | httpx.TransportError = error
            else:
                if response.is_success:
                    return response
                failure = response
            time.sleep(retry_s(call, attempt, attempts or self._attempts, failure))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _list(self, pages: Pages[Result]) -> Iterator[Result]:
        """Ask for the first page at once, so that errors are raised where the list is asked for."""
        return self._items(pages, *self._send(pages.page(None)))

    def _items(self, pages: Pages[Result], items: Sequence[Result], cursor: str | None) -> Iterator[Result]:
        yield from items
        while cursor is not None:
            items, cursor = self._send(pages.page(cursor))
            yield from items

    def _stream(self, call: Call[Result]) -> Generator[Result, None, None]:
        """Stream a response. Once it has begun there is no retry: the caller would get those bytes twice."""
        with closing(self._open(call, stream=True)) as response, reading(response):
            yield from map(call.parse, response.iter_bytes())

    def _follow(self, call: Call[Result]) -> Generator[Result, None, None]:
        """Yield events without end. A broken connection is opened again, with the id of the last event.

        Before the first response, errors are raised after the usual attempts; later, only those that last.
        """
        position, attempts = call.arguments["headers"].get(LAST_EVENT_ID), float(self._attempts)
        while True:
            response = self._open(resumed(call, position), stream=True, attempts=attempts)
            attempts = math.inf
            with suppress(KithUnreachableError), closing(response), reading(response):
                for event in httpx.EventSource(response):
                    position = event.id or position
                    if event.data:
                        yield parse_event(call, response, event)
            time.sleep(backoff_s(0))


class AsyncSender(Connection):
    """Send calls and retry failed ones. Files are read and images encoded in threads, not in the event loop."""

    _kind = httpx.AsyncClient
    _http: httpx.AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _send(self, call: Call[Result]) -> Result:
        try:
            return parse_response(call, await self._open(call))
        except KithClientError as error:
            if error.code not in call.instead:
                raise
            return await self._send(call.instead[error.code])

    async def _open(self, call: Call[object], stream: bool = False, attempts: float = 0) -> httpx.Response:
        """Send a call until the server accepts it; with ``stream``, the caller reads and closes the response.

        Raises KithClientError, KithUnreachableError after ``attempts``, by default those of the client.
        """
        for attempt in count():
            arguments = build_arguments(call, self._timeout_s)
            if call.stream is not None:
                arguments["content"] = _read(call.stream)
            try:
                response = await self._http.send(self._http.build_request(**arguments), stream=True)
                if not (stream and response.is_success):
                    async with aclosing(response):
                        await response.aread()
            except httpx.DecodingError:
                raise unknown_response_error(response.status_code) from None
            except httpx.TransportError as error:
                failure: httpx.Response | httpx.TransportError = error
            else:
                if response.is_success:
                    return response
                failure = response
            await asyncio.sleep(retry_s(call, attempt, attempts or self._attempts, failure))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _list(self, pages: Pages[Result]) -> AsyncIterator[Result]:
        cursor: str | None = None
        while True:
            items, cursor = await self._send(pages.page(cursor))
            for item in items:
                yield item
            if cursor is None:
                return

    async def _stream(self, call: Call[Result]) -> AsyncGenerator[Result, None]:
        """Stream a response. Once it has begun there is no retry: the caller would get those bytes twice."""
        response = await self._open(call, stream=True)
        async with aclosing(response):
            with reading(response):
                async for chunk in response.aiter_bytes():
                    yield call.parse(chunk)

    async def _follow(self, call: Call[Result]) -> AsyncGenerator[Result, None]:
        """Yield events without end. A broken connection is opened again, with the id of the last event.

        Before the first response, errors are raised after the usual attempts; later, only those that last.
        """
        position, attempts = call.arguments["headers"].get(LAST_EVENT_ID), float(self._attempts)
        while True:
            response = await self._open(resumed(call, position), stream=True, attempts=attempts)
            attempts = math.inf
            async with aclosing(response):
                with suppress(KithUnreachableError), reading(response):
                    async for event in httpx.EventSource(response):
                        position = event.id or position
                        if event.data:
                            yield parse_event(call, response, event)
            await asyncio.sleep(backoff_s(0))


async def _read(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(chunks)
    while (chunk := await asyncio.to_thread(next, iterator, None)) is not None:
        yield chunk

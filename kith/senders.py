"""Sending of calls with retries, in threads or in an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2 as httpx

from kith.errors import KithClientError, unknown_response_error
from kith.event_streams import LAST_EVENT_ID, EventParser, parse_event, resumed
from kith.requests import Call, Pages
from kith.retries import RetryPolicy
from kith.transport import (
    DEFAULT_ATTEMPTS,
    DEFAULT_CONNECTIONS,
    DEFAULT_TIMEOUT_S,
    build_arguments,
    build_headers,
    find_url,
    open_http,
    parse_response,
    parse_url,
)
from kith.wire.events import EventOut

Result = TypeVar("Result")


class Sender:
    """Send calls and retry failed ones."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        attempts: int = DEFAULT_ATTEMPTS,
        connections: int = DEFAULT_CONNECTIONS,
    ) -> None:
        address = find_url(url)
        self._retries = RetryPolicy(address, attempts)
        self._timeout_s = timeout_s
        self._http = open_http(httpx.Client, parse_url(address), build_headers(api_key), timeout_s, connections)

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
            return self._attempt(call)
        except KithClientError as error:
            if (instead := call.instead.get(error.code)) is None:
                raise
        return self._attempt(instead)

    def _attempt(self, call: Call[Result]) -> Result:
        for attempt in count():
            try:
                with self._http.stream(**self._arguments(call)) as response:
                    try:
                        response.read()
                    except httpx.DecodingError:
                        raise unknown_response_error(response.status_code) from None
            except httpx.TransportError as error:
                failure: httpx.Response | httpx.TransportError = error
            else:
                if response.is_success:
                    return parse_response(call, response)
                failure = response
            time.sleep(self._retries.delay_s(call, attempt, failure))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _arguments(self, call: Call[object]) -> dict[str, Any]:
        arguments = build_arguments(call, self._timeout_s)
        return arguments if call.stream is None else arguments | {"content": call.stream}

    def _list(self, pages: Pages[Result]) -> Iterator[Result]:
        """Ask for the first page at once, so that errors are raised where the list is asked for."""
        return self._items(pages, *self._send(pages.page(None)))

    def _items(self, pages: Pages[Result], items: Sequence[Result], cursor: str | None) -> Iterator[Result]:
        yield from items
        while cursor is not None:
            items, cursor = self._send(pages.page(cursor))
            yield from items

    def _stream(self, call: Call[bytes]) -> Generator[bytes, None, None]:
        self._arguments(call)  # refuse what cannot be sent where the stream is asked for, not at its first chunk
        return self._chunks(call)

    def _chunks(self, call: Call[bytes]) -> Generator[bytes, None, None]:
        """Stream a response. After the first chunk there is no retry: the caller would get those bytes twice."""
        for attempt in count():
            started = False
            try:
                with self._http.stream(**self._arguments(call)) as response:
                    if response.is_success:
                        for chunk in response.iter_bytes():
                            started = True
                            yield chunk
                        return
                    response.read()
                failure: httpx.Response | httpx.TransportError = response
            except httpx.DecodingError:
                raise unknown_response_error(response.status_code) from None
            except httpx.TransportError as error:
                failure = error
            time.sleep(self._retries.delay_s(call, self._retries.attempts if started else attempt, failure))

    def _follow(self, call: Call[EventOut]) -> Generator[EventOut, None, None]:
        self._arguments(call)  # as in _stream
        return self._events(call)

    def _events(self, call: Call[EventOut]) -> Generator[EventOut, None, None]:
        """Yield events without end. A broken connection is opened again, with the id of the last event.

        Before the first response, errors are raised after the usual attempts; later, only those that last.
        """
        parser = EventParser(call.arguments["headers"].get(LAST_EVENT_ID))
        failures, connected = 0, False
        while True:
            try:
                with self._http.stream(**self._arguments(resumed(call, parser.last_id))) as response:
                    if response.is_success:
                        failures, connected, parser = 0, True, EventParser(parser.last_id)
                        for chunk in response.iter_bytes():
                            for data in parser.feed(chunk):
                                yield parse_event(call, response, data, parser)
                    else:
                        response.read()
                failure: httpx.Response | httpx.TransportError | None = None if response.is_success else response
            except httpx.DecodingError:
                raise unknown_response_error(response.status_code) from None
            except httpx.TransportError as error:
                failure = error
            delay_s = self._retries.follow_delay_s(call, failures, failure, connected)
            failures += 1
            time.sleep(delay_s)


class AsyncSender:
    """Send calls and retry failed ones. Files are read and images encoded in threads, not in the event loop."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        attempts: int = DEFAULT_ATTEMPTS,
        connections: int = DEFAULT_CONNECTIONS,
    ) -> None:
        address = find_url(url)
        self._retries = RetryPolicy(address, attempts)
        self._timeout_s = timeout_s
        self._http = open_http(httpx.AsyncClient, parse_url(address), build_headers(api_key), timeout_s, connections)

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
            return await self._attempt(call)
        except KithClientError as error:
            if (instead := call.instead.get(error.code)) is None:
                raise
        return await self._attempt(instead)

    async def _attempt(self, call: Call[Result]) -> Result:
        for attempt in count():
            try:
                async with self._http.stream(**self._arguments(call)) as response:
                    try:
                        await response.aread()
                    except httpx.DecodingError:
                        raise unknown_response_error(response.status_code) from None
            except httpx.TransportError as error:
                failure: httpx.Response | httpx.TransportError = error
            else:
                if response.is_success:
                    return parse_response(call, response)
                failure = response
            await asyncio.sleep(self._retries.delay_s(call, attempt, failure))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _arguments(self, call: Call[object]) -> dict[str, Any]:
        arguments = build_arguments(call, self._timeout_s)
        return arguments if call.stream is None else arguments | {"content": _read(call.stream)}

    def _list(self, pages: Pages[Result]) -> AsyncIterator[Result]:
        self._arguments(pages.page(None))  # refuse what cannot be sent where the list is asked for
        return self._items(pages)

    async def _items(self, pages: Pages[Result]) -> AsyncIterator[Result]:
        cursor: str | None = None
        while True:
            items, cursor = await self._send(pages.page(cursor))
            for item in items:
                yield item
            if cursor is None:
                return

    def _stream(self, call: Call[bytes]) -> AsyncGenerator[bytes, None]:
        self._arguments(call)  # refuse what cannot be sent where the stream is asked for, not at its first chunk
        return self._chunks(call)

    async def _chunks(self, call: Call[bytes]) -> AsyncGenerator[bytes, None]:
        """Stream a response. After the first chunk there is no retry: the caller would get those bytes twice."""
        for attempt in count():
            started = False
            try:
                async with self._http.stream(**self._arguments(call)) as response:
                    if response.is_success:
                        async for chunk in response.aiter_bytes():
                            started = True
                            yield chunk
                        return
                    await response.aread()
                failure: httpx.Response | httpx.TransportError = response
            except httpx.DecodingError:
                raise unknown_response_error(response.status_code) from None
            except httpx.TransportError as error:
                failure = error
            await asyncio.sleep(self._retries.delay_s(call, self._retries.attempts if started else attempt, failure))

    def _follow(self, call: Call[EventOut]) -> AsyncGenerator[EventOut, None]:
        self._arguments(call)  # as in _stream
        return self._events(call)

    async def _events(self, call: Call[EventOut]) -> AsyncGenerator[EventOut, None]:
        """Yield events without end. A broken connection is opened again, with the id of the last event.

        Before the first response, errors are raised after the usual attempts; later, only those that last.
        """
        parser = EventParser(call.arguments["headers"].get(LAST_EVENT_ID))
        failures, connected = 0, False
        while True:
            try:
                async with self._http.stream(**self._arguments(resumed(call, parser.last_id))) as response:
                    if response.is_success:
                        failures, connected, parser = 0, True, EventParser(parser.last_id)
                        async for chunk in response.aiter_bytes():
                            for data in parser.feed(chunk):
                                yield parse_event(call, response, data, parser)
                    else:
                        await response.aread()
                failure: httpx.Response | httpx.TransportError | None = None if response.is_success else response
            except httpx.DecodingError:
                raise unknown_response_error(response.status_code) from None
            except httpx.TransportError as error:
                failure = error
            delay_s = self._retries.follow_delay_s(call, failures, failure, connected)
            failures += 1
            await asyncio.sleep(delay_s)


async def _read(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(chunks)
    while (chunk := await asyncio.to_thread(next, iterator, None)) is not None:
        yield chunk

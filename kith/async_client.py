"""Asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from itertools import count
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx2 as httpx

from kith import calls
from kith.errors import unknown_response_error
from kith.requests import Call, Pages
from kith.retries import RetryPolicy
from kith.transport import (
    ACTIVE_STATES,
    DEFAULT_ATTEMPTS,
    DEFAULT_CONNECTIONS,
    DEFAULT_TIMEOUT_S,
    as_method,
    build_arguments,
    build_headers,
    open_http,
    parse_response,
    parse_url,
    poll_delays_s,
)
from kith.wire.jobs import JobOut

P = ParamSpec("P")
Result = TypeVar("Result")


class AsyncSender:
    """Send calls and retry failed ones. Files are read and images encoded in threads, not in the event loop."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        attempts: int = DEFAULT_ATTEMPTS,
        connections: int = DEFAULT_CONNECTIONS,
    ) -> None:
        self._retries = RetryPolicy(url, attempts)
        self._timeout_s = timeout_s
        self._http = open_http(httpx.AsyncClient, parse_url(url), build_headers(api_key), timeout_s, connections)

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

    async def _list(self, pages: Pages[Result]) -> AsyncIterator[Result]:
        cursor: str | None = None
        while True:
            items, cursor = await self._send(pages.page(cursor))
            for item in items:
                yield item
            if cursor is None:
                return

    async def _stream(self, call: Call[bytes]) -> AsyncGenerator[bytes, None]:
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


async def _read(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(chunks)
    while (chunk := await asyncio.to_thread(next, iterator, None)) is not None:
        yield chunk


def _one(describe: Callable[P, Call[Result]]) -> Callable[Concatenate[AsyncSender, P], Coroutine[Any, Any, Result]]:
    async def method(sender: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await sender._send(describe(*args, **kwargs))

    return as_method(method, describe)


def _reading(describe: Callable[P, Call[Result]]) -> Callable[Concatenate[AsyncSender, P], Coroutine[Any, Any, Result]]:
    async def method(sender: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await sender._send(await asyncio.to_thread(describe, *args, **kwargs))

    return as_method(method, describe)


def _each(describe: Callable[P, Pages[Result]]) -> Callable[Concatenate[AsyncSender, P], AsyncIterator[Result]]:
    def method(sender: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Result]:
        return sender._list(describe(*args, **kwargs))

    return as_method(method, describe, "AsyncIterator[{}]")


def _chunks(describe: Callable[P, Call[bytes]]) -> Callable[Concatenate[AsyncSender, P], AsyncGenerator[bytes, None]]:
    def method(sender: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[bytes, None]:
        return sender._stream(describe(*args, **kwargs))

    return as_method(method, describe, "AsyncGenerator[{}, None]")


class AsyncKith(AsyncSender):
    """Client with the methods and arguments of :class:`kith.Kith`, as coroutines and asynchronous iterators.

    Cancellation closes the connection, and the server stops the work.
    """

    # Faces
    detect = _reading(calls.detect)
    embed = _reading(calls.embed)
    verify = _reading(calls.verify)

    # Galleries
    create_gallery = _one(calls.create_gallery)
    gallery = _one(calls.gallery)
    galleries = _each(calls.galleries)
    update_gallery = _one(calls.update_gallery)
    delete_gallery = _one(calls.delete_gallery)
    stats = _one(calls.stats)
    retention = _one(calls.retention)
    apply_retention = _one(calls.apply_retention)
    hygiene = _one(calls.hygiene)
    findings = _each(calls.findings)
    risk = _one(calls.risk)
    calibrate = _one(calls.calibrate)
    audit = _each(calls.audit)

    async def gallery_names(self) -> set[str]:
        """Return the names of all galleries."""
        return {gallery.name async for gallery in self.galleries()}

    # Migration to another recognizer
    migrate = _one(calls.migrate)
    migration = _one(calls.migration)
    cut_over = _one(calls.cut_over)
    roll_back = _one(calls.roll_back)
    finish_migration = _one(calls.finish_migration)

    # Import and export
    import_gallery = _one(calls.import_gallery)
    export_gallery = _chunks(calls.export_gallery)

    # Subjects and templates
    put_subject = _one(calls.put_subject)
    update_subject = _one(calls.update_subject)
    subject = _one(calls.subject)
    subjects = _each(calls.subjects)
    delete_subject = _one(calls.delete_subject)
    merge_subject = _one(calls.merge_subject)
    export_subject = _one(calls.export_subject)
    thumbnail = _one(calls.thumbnail)
    crop = _one(calls.crop)
    erasures = _each(calls.erasures)
    verify_receipt = _one(calls.verify_receipt)
    enroll = _reading(calls.enroll)
    template = _one(calls.template)
    templates = _each(calls.templates)
    move_template = _one(calls.move_template)
    delete_template = _one(calls.delete_template)
    identify = _reading(calls.identify)

    # Jobs
    enroll_archive = _one(calls.enroll_archive)
    job = _one(calls.job)
    jobs = _each(calls.jobs)
    job_items = _each(calls.job_items)
    cancel_job = _one(calls.cancel_job)

    async def wait_for(
        self, job: str, timeout_s: float | None = None, on_update: Callable[[JobOut], object] | None = None
    ) -> JobOut:
        """Poll a job until it finishes; pass each poll to ``on_update``. Raise TimeoutError after ``timeout_s``."""
        for delay_s in poll_delays_s(job, timeout_s):
            found = await self.job(job)
            if on_update is not None:
                on_update(found)
            if found.state not in ACTIVE_STATES:
                return found
            await asyncio.sleep(delay_s)
        raise AssertionError("unreachable: the delays end by raising")

    # API keys
    create_key = _one(calls.create_key)
    api_key = _one(calls.api_key)
    api_keys = _each(calls.api_keys)
    revoke_key = _one(calls.revoke_key)
    rotate_key = _one(calls.rotate_key)

    # Webhooks
    create_webhook = _one(calls.create_webhook)
    webhooks = _each(calls.webhooks)
    webhook = _one(calls.webhook)
    delete_webhook = _one(calls.delete_webhook)
    test_webhook = _one(calls.test_webhook)
    replay_webhook = _one(calls.replay_webhook)
    deliveries = _each(calls.deliveries)

    # Server
    model = _one(calls.model)
    health = _one(calls.health)
    ready = _one(calls.ready)
    status = _one(calls.status)
    metrics = _one(calls.metrics)

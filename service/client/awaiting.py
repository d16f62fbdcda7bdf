"""The client of those who have an event loop: the same methods, awaited; lists and exports by ``async for``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import count
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx2 as httpx

from service.api.schemas import JobOut
from service.client import calls
from service.client.errors import not_kiths
from service.client.requests import Call, Pages
from service.client.retries import Retries
from service.client.sending import (
    CONNECTIONS,
    UNDER_WAY,
    address_of,
    answer_of,
    arguments_of,
    as_method,
    headers_of,
    opened,
    pauses,
    unseen,
)

P = ParamSpec("P")
Result = TypeVar("Result")


class AsyncSender:
    """Sends calls. What is read from files, or made of images, is so in a thread: the loop goes on."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        attempts: int = 4,
        connections: int = CONNECTIONS,
    ) -> None:
        self._retries = Retries(url, attempts)
        self._timeout_s = timeout_s
        self._http = opened(httpx.AsyncClient, address_of(url), headers_of(api_key), timeout_s, connections)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def _send(self, call: Call[Result]) -> Result:
        for attempt in count():
            try:
                async with self._http.stream(**self._asked(call)) as response:
                    try:
                        await response.aread()
                    except httpx.DecodingError:
                        raise not_kiths(response.status_code) from None
            except httpx.TransportError as error:
                failed: httpx.Response | httpx.TransportError = error
            else:
                if response.is_success:
                    return answer_of(call, response)
                failed = response
            await asyncio.sleep(self._retries.pause_s(call, attempt, failed))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _asked(self, call: Call[object]) -> dict[str, Any]:
        asked = arguments_of(call, self._timeout_s)
        return asked if call.pieces is None else asked | {"content": _read(call.pieces)}

    async def _list(self, pages: Pages[Result]) -> AsyncIterator[Result]:
        cursor: str | None = None
        while True:
            items, cursor = await self._send(pages.page(cursor))
            for item in items:
                yield item
            if cursor is None:
                return

    async def _stream(self, call: Call[bytes]) -> AsyncIterator[bytes]:
        """What came is not asked for again: a connection that breaks amid the answer is the caller's to know of."""
        for attempt in count():
            began = False
            try:
                async with self._http.stream(**self._asked(call)) as response:
                    if response.is_success:
                        async for piece in response.aiter_bytes():
                            began = True
                            yield piece
                        return
                    await response.aread()
                failed: httpx.Response | httpx.TransportError = response
            except httpx.DecodingError:
                raise not_kiths(response.status_code) from None
            except httpx.TransportError as error:
                failed = error
            await asyncio.sleep(self._retries.pause_s(call, self._retries.attempts if began else attempt, failed))


async def _read(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(pieces)
    while (piece := await asyncio.to_thread(next, iterator, None)) is not None:
        yield piece


def _one(describe: Callable[P, Call[Result]]) -> Callable[Concatenate[AsyncSender, P], Awaitable[Result]]:
    async def method(sender: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await sender._send(describe(*args, **kwargs))

    return as_method(method, describe, "Awaitable[{}]")


def _reading(describe: Callable[P, Call[Result]]) -> Callable[Concatenate[AsyncSender, P], Awaitable[Result]]:
    async def method(sender: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await sender._send(await asyncio.to_thread(describe, *args, **kwargs))

    return as_method(method, describe, "Awaitable[{}]")


def _each(describe: Callable[P, Pages[Result]]) -> Callable[Concatenate[AsyncSender, P], AsyncIterator[Result]]:
    def method(sender: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Result]:
        return sender._list(describe(*args, **kwargs))

    return as_method(method, describe, "AsyncIterator[{}]")


def _pieces(describe: Callable[P, Call[bytes]]) -> Callable[Concatenate[AsyncSender, P], AsyncIterator[bytes]]:
    def method(sender: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[bytes]:
        return sender._stream(describe(*args, **kwargs))

    return as_method(method, describe, "AsyncIterator[{}]")


class AsyncKith(AsyncSender):
    """As :class:`service.client.Kith`, with the same arguments, to be awaited. A call that is cancelled closes its
    connection, and the server works for it no longer."""

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
        return {gallery.name async for gallery in self.galleries()}

    # Moving to another recogniser
    migrate = _one(calls.migrate)
    migration = _one(calls.migration)
    cut_over = _one(calls.cut_over)
    roll_back = _one(calls.roll_back)
    finish_migration = _one(calls.finish_migration)

    # In and out
    import_gallery = _one(calls.import_gallery)
    export_gallery = _pieces(calls.export_gallery)

    # Subjects and templates
    put_subject = _one(calls.put_subject)
    update_subject = _one(calls.update_subject)
    subject = _one(calls.subject)
    subjects = _each(calls.subjects)
    delete_subject = _one(calls.delete_subject)
    merge_subject = _one(calls.merge_subject)
    export_subject = _one(calls.export_subject)
    erasures = _each(calls.erasures)
    verify_receipt = _one(calls.verify_receipt)
    enrol = _reading(calls.enrol)
    template = _one(calls.template)
    templates = _each(calls.templates)
    move_template = _one(calls.move_template)
    delete_template = _one(calls.delete_template)
    identify = _reading(calls.identify)

    # Jobs
    enrol_archive = _one(calls.enrol_archive)
    job = _one(calls.job)
    jobs = _each(calls.jobs)
    job_items = _each(calls.job_items)
    cancel_job = _one(calls.cancel_job)

    async def wait_for(
        self, job: str, timeout_s: float | None = None, seen: Callable[[JobOut], object] = unseen
    ) -> JobOut:
        """Ask until the job is finished, each answer shown to ``seen``. Raises TimeoutError."""
        for pause_s in pauses(job, timeout_s):
            found = await self.job(job)
            seen(found)
            if found.state not in UNDER_WAY:
                return found
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: pauses end by raising")

    # API keys
    create_key = _one(calls.create_key)
    api_key = _one(calls.api_key)
    api_keys = _each(calls.api_keys)
    revoke_key = _one(calls.revoke_key)
    rotate_key = _one(calls.rotate_key)

    # The service
    model = _one(calls.model)
    health = _one(calls.health)
    ready = _one(calls.ready)
    status = _one(calls.status)
    metrics = _one(calls.metrics)

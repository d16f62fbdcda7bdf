"""Synchronous client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
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


class Sender:
    """Send calls and retry failed ones."""

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
        self._http = open_http(httpx.Client, parse_url(url), build_headers(api_key), timeout_s, connections)

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
        cursor: str | None = None
        while True:
            items, cursor = self._send(pages.page(cursor))
            yield from items
            if cursor is None:
                return

    def _stream(self, call: Call[bytes]) -> Generator[bytes, None, None]:
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


def _one(describe: Callable[P, Call[Result]]) -> Callable[Concatenate[Sender, P], Result]:
    def method(sender: Sender, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return sender._send(describe(*args, **kwargs))

    return as_method(method, describe)


def _each(describe: Callable[P, Pages[Result]]) -> Callable[Concatenate[Sender, P], Iterator[Result]]:
    def method(sender: Sender, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Result]:
        return sender._list(describe(*args, **kwargs))

    return as_method(method, describe, "Iterator[{}]")


def _chunks(describe: Callable[P, Call[bytes]]) -> Callable[Concatenate[Sender, P], Generator[bytes, None, None]]:
    def method(sender: Sender, /, *args: P.args, **kwargs: P.kwargs) -> Generator[bytes, None, None]:
        return sender._stream(describe(*args, **kwargs))

    return as_method(method, describe, "Generator[{}, None, None]")


class Kith(Sender):
    """Client of one server. Thread-safe.

    Safe calls are retried with backoff if the server is busy (429, 503) or the connection is lost (docs/client.md).

    Args:
        url: address of the server, such as http://127.0.0.1:8000.
        api_key: API key, if the server requires one.
        timeout_s: maximum wait for data per attempt, in seconds.
        attempts: maximum number of attempts per call.
        connections: maximum number of connections; further calls wait.

    Raises:
        KithClientError: raised by every method if the server refuses the call or fails.
        KithUnreachableError: raised by every method if the server does not respond.
    """

    # Faces
    detect = _one(calls.detect)
    embed = _one(calls.embed)
    verify = _one(calls.verify)

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

    def gallery_names(self) -> set[str]:
        """Return the names of all galleries."""
        return {gallery.name for gallery in self.galleries()}

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
    enroll = _one(calls.enroll)
    template = _one(calls.template)
    templates = _each(calls.templates)
    move_template = _one(calls.move_template)
    delete_template = _one(calls.delete_template)
    identify = _one(calls.identify)

    # Jobs
    enroll_archive = _one(calls.enroll_archive)
    job = _one(calls.job)
    jobs = _each(calls.jobs)
    job_items = _each(calls.job_items)
    cancel_job = _one(calls.cancel_job)

    def wait_for(
        self, job: str, timeout_s: float | None = None, on_update: Callable[[JobOut], object] | None = None
    ) -> JobOut:
        """Poll a job until it finishes; pass each poll to ``on_update``. Raise TimeoutError after ``timeout_s``."""
        for delay_s in poll_delays_s(job, timeout_s):
            found = self.job(job)
            if on_update is not None:
                on_update(found)
            if found.state not in ACTIVE_STATES:
                return found
            time.sleep(delay_s)
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

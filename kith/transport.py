"""HTTP details that the sync and the async client share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, Final, TypeVar

import httpx2 as httpx

from kith.errors import KithUnreachableError, local_error, unknown_response_error
from kith.requests import LAST_EVENT_ID, Call

ACTIVE_STATES: Final = ("queued", "running")
KEY_VARIABLES: Final = ("KITH_CLIENT_KEY", "KITH_API_KEY")
"""Environment variables of the API key, the first that is set. The second is the server's own key."""
HTTP_VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that httpx reads; proxy variables also in lower case."""
Result = TypeVar("Result")
Http = TypeVar("Http")


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
    try:
        address = httpx.URL(given)
        if address.scheme in ("http", "https") and address.host and not (address.query or address.fragment):
            return address
    except (httpx.InvalidURL, UnicodeError):
        pass
    raise local_error(
        "invalid_address",
        "the server's address is invalid",
        "Use an address such as http://127.0.0.1:8000 or https://example.org/kith, without a query or fragment.",
    ) from None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is the local machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def open_http(
    kind: Callable[..., Http], url: str | None, api_key: str | None, timeout_s: float, attempts: int, connections: int
) -> Http:
    """Open an HTTP client that uses the environment's proxies, except for the local machine.

    A request to the local machine holds a key and photos, and a remote proxy could not reach its destination.

    Raises:
        KithClientError: the address, the key, or the environment's proxy or certificates are unusable. The message
            omits their values, which may contain a password.
    """
    if attempts < 1:
        raise ValueError("attempts must be at least 1: it counts the first attempt")
    address = parse_url(url)
    local = is_loopback(address.host)
    headers = build_headers(api_key)
    try:
        return kind(
            base_url=address,
            headers=headers,
            timeout=build_timeout(timeout_s),
            limits=httpx.Limits(max_connections=connections),
            trust_env=not local,
            verify=httpx.create_ssl_context() if local and address.scheme == "https" else True,
        )
    except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
        present = [name for name in HTTP_VARIABLES if os.environ.get(name) or os.environ.get(name.lower())]
        raise local_error(
            "invalid_environment",
            f"the environment's proxy or certificates cannot be used ({type(error).__name__})",
            f"Correct or unset {', '.join(present or HTTP_VARIABLES)}.",
        ) from None


def build_timeout(timeout_s: float, long_running: bool = False) -> httpx.Timeout:
    """Build timeouts. Waiting for a free connection of the pool has none, because the server is not at fault."""
    return httpx.Timeout(connect=timeout_s, read=None if long_running else timeout_s, write=timeout_s, pool=None)


def build_arguments(call: Call[object], timeout_s: float) -> dict[str, Any]:
    """Build the arguments of httpx's ``stream``, except for a streamed body.

    Raises:
        KithClientError: ``invalid_request``, before anything is sent: JSON or a URL cannot represent a value.
    """
    arguments = {"method": call.method, "url": call.path, **call.arguments}
    if call.long_running:
        arguments["timeout"] = build_timeout(timeout_s, long_running=True)
    if "params" in arguments:
        arguments["params"] = _encode_query(arguments["params"])
    if "json" in arguments:
        arguments["content"] = _encode_json(arguments.pop("json"))
        arguments["headers"] = {"Content-Type": "application/json", **(arguments.get("headers") or {})}
    return arguments


def _encode_query(params: Mapping[str, Any]) -> httpx.QueryParams:
    query = httpx.QueryParams(params)
    try:
        str(query)
    except UnicodeEncodeError:
        raise local_error(
            "invalid_request", "a query parameter has an unpaired surrogate", "Use valid Unicode text."
        ) from None
    return query


def _encode_json(body: object) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:  # NaN, infinity, or an unpaired surrogate
        raise local_error(
            "invalid_request",
            f"the request cannot be encoded as JSON: {error}",
            "Use finite numbers and valid Unicode text.",
        ) from None


def parse_response(call: Call[Result], response: httpx.Response) -> Result:
    """Parse a successful response. Raise KithClientError if another program than Kith sent it."""
    try:
        return call.parse(response.content)
    except (ValueError, RecursionError):  # pydantic raises subclasses of ValueError
        raise unknown_response_error(response.status_code) from None


def parse_event(call: Call[Result], response: httpx.Response, event: httpx.ServerSentEvent) -> Result:
    """Parse an event. Raise KithClientError if another program than Kith sent it."""
    try:
        return call.parse(json.dumps(json.loads(event.data) | {"position": event.id}).encode())
    except (TypeError, ValueError, RecursionError):
        raise unknown_response_error(response.status_code) from None


def resumed(call: Call[Result], position: str | None) -> Call[Result]:
    """Return the call of a stream that continues after a position."""
    headers = {} if position is None else {LAST_EVENT_ID: position}
    return replace(call, arguments={**call.arguments, "headers": headers})


@contextmanager
def reading(response: httpx.Response) -> Iterator[None]:
    """Raise KithClientError for what interrupts the reading of a response."""
    try:
        yield
    except (httpx.DecodingError, httpx.SSEError):
        raise unknown_response_error(response.status_code) from None
    except httpx.TransportError as error:
        raise KithUnreachableError(error) from error


def poll_delays_s(job: str, timeout_s: float | None) -> Iterator[float]:
    """Yield the delay before each poll of a job. Raise TimeoutError at the deadline."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    delay_s = 0.05
    while True:
        yield delay_s
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"job {job} did not finish within {timeout_s} s")
        delay_s = min(1.0, delay_s * 1.5)

"""What both clients do alike."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, Final, TypeVar

import httpx2 as httpx

from service.api.schemas import JobOut
from service.client.errors import KithClientError, not_kiths
from service.client.requests import Call
from service.security.addresses import is_loopback

CONNECTIONS: Final = 32
UNDER_WAY: Final = ("queued", "running")
"""States of a job that is not finished."""
ENVIRONMENT: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""What httpx looks at; of proxies' names, also in small letters."""
Result = TypeVar("Result")
Http = TypeVar("Http")
Method = TypeVar("Method", bound=Callable[..., object])


def headers_of(api_key: str | None) -> dict[str, str]:
    """Raises KithClientError, which does not quote it: no header can carry it."""
    key = (api_key or "").rstrip("\r\n")  # of a file
    if not (key.isascii() and key.isprintable()):
        detail = "the API key has characters that no key has"
        raise KithClientError(0, {"code": "invalid_key", "detail": detail, "remedy": "Copy it again, without spaces."})
    return {"Authorization": f"Bearer {key}"} if key else {}


def address_of(url: str) -> httpx.URL:
    """Raises KithClientError: no server can be there. It is not quoted: a password may be in it."""
    try:
        address = httpx.URL(url)
        if address.scheme in ("http", "https") and address.host:
            return address
    except (httpx.InvalidURL, UnicodeError):
        pass
    detail = "the address is none of a server"
    remedy = "It is to be like http://127.0.0.1:8000: http:// or https://, a name, and a port if it is not the usual."
    raise KithClientError(0, {"code": "invalid_address", "detail": detail, "remedy": remedy}) from None


def opened(
    kind: Callable[..., Http], address: httpx.URL, headers: Mapping[str, str], timeout_s: float, connections: int
) -> Http:
    """An HTTP client; of the environment's proxies, those of HTTPX, but none on the way to this machine itself: a
    request for it holds a key and photos, and a proxy elsewhere would not find it.

    Raises:
        KithClientError: the environment names a proxy, or certificates, that cannot be used. They are not quoted: a
            password may be in them.
    """
    here = is_loopback(address.host)
    try:
        return kind(
            base_url=address,
            headers=headers,
            timeout=timeout_of(timeout_s),
            limits=httpx.Limits(max_connections=connections),
            trust_env=not here,
            verify=httpx.create_ssl_context() if here and address.scheme == "https" else True,
        )
    except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
        given = [name for name in ENVIRONMENT if os.environ.get(name) or os.environ.get(name.lower())]
        detail = f"the environment's proxy or certificates cannot be used ({type(error).__name__})"
        remedy = f"Correct or unset {', '.join(given) or ', '.join(ENVIRONMENT)}."
        raise KithClientError(0, {"code": "invalid_environment", "detail": detail, "remedy": remedy}) from None


def answer_of(call: Call[Result], response: httpx.Response) -> Result:
    """Raises KithClientError: something else answers there."""
    try:
        return call.read(response.content)
    except (ValueError, RecursionError):  # pydantic's are ValueErrors
        raise not_kiths(response.status_code) from None


def timeout_of(timeout_s: float, patient: bool = False) -> httpx.Timeout:
    """Whoever waits for one of the client's own connections waits for no fault of the server's. ``patient``: so may the
    answer be waited for."""
    read = None if patient else timeout_s
    return httpx.Timeout(connect=timeout_s, read=read, write=read, pool=None)


def arguments_of(call: Call[object], timeout_s: float) -> dict[str, Any]:
    """Of httpx's ``request`` and ``stream``, but for a body that is made while it is sent.

    Raises:
        KithClientError: ``invalid_request``, before anything is sent: JSON has no such value.
    """
    patience = {"timeout": timeout_of(timeout_s, patient=True)} if call.patient else {}
    arguments = {"method": call.method, "url": call.path, **call.arguments, **patience}
    if "json" in arguments:
        arguments["content"] = _json_of(arguments.pop("json"))
        arguments["headers"] = {"Content-Type": "application/json", **(arguments.get("headers") or {})}
    return arguments


def _json_of(body: object) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:  # NaN, infinity, half a surrogate pair
        detail = f"what is to be sent is no JSON: {error}"
        remedy = "Numbers are finite, and text is Unicode's."
        raise KithClientError(0, {"code": "invalid_request", "detail": detail, "remedy": remedy}) from None


def pauses(job: str, timeout_s: float | None) -> Iterator[float]:
    """How long to wait each time before a job is asked after again. Raises TimeoutError."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = 0.05
    while True:
        yield pause_s
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"job {job} is not finished after {timeout_s} s")
        pause_s = min(1.0, pause_s * 1.5)


def unseen(job: JobOut) -> None:
    """Nobody looks at a job while it is waited for."""


def as_method(method: Method, description: Callable[..., object], gives: str = "{}") -> Method:
    """With the name, the document and the parameters of what describes the call; ``gives``: what, of its answer."""
    wraps(description)(method)
    signature = inspect.signature(description)
    answer = str(signature.return_annotation).partition("[")[2].removesuffix("]")  # of Call[...] or Pages[...]
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *signature.parameters.values()]
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=gives.format(answer)
    )
    return method

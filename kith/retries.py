"""Retry policy of the client.

Every call is retried after a rejection (429, or 503 from a server that did nothing). After a lost connection or a
timeout the server may have completed the call, so only repeatable calls are retried.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx2 as httpx

from kith.errors import MAYBE_DONE_REMEDY, UNKNOWN_CODE, UNKNOWN_REMEDY, KithClientError, KithUnreachableError
from kith.requests import Call

INITIAL_DELAY_S: Final = 0.2
MAX_DELAY_S: Final = 30.0
"""Maximum delay between two attempts. The client gives up if Retry-After asks for more."""
BUSY_STATUSES: Final = frozenset({429, 503})
GATEWAY_STATUSES: Final = frozenset({502, 504})
"""Statuses of a proxy whose connection to the server was lost or timed out."""
PROXY_CODES: Final = frozenset({"node_lost", "node_silent"})
"""Codes that docker/haproxy.cfg sends with a gateway status. Any other code comes from the server itself."""
AMBIGUOUS_CODE: Final = "storage_unavailable"
"""The code with status 503 after which the change may have been committed."""
PERMANENT_ERRORS: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
UNSENT_ERRORS: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, *PERMANENT_ERRORS)


@dataclass(frozen=True)
class RetryPolicy:
    """``url`` is the server's, for messages; ``attempts`` counts the first one."""

    url: str
    attempts: int

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError("attempts must be at least 1: it counts the first attempt")

    def delay_s(self, call: Call[object], attempt: int, failure: httpx.Response | httpx.TransportError) -> float:
        """Return the delay before the next attempt. ``attempt`` counts from 0.

        Raises:
            KithClientError, KithUnreachableError: the call is not retried.
        """
        last = attempt + 1 >= self.attempts
        if isinstance(failure, httpx.TransportError):
            safe = isinstance(failure, UNSENT_ERRORS) or call.repeatable
            if last or isinstance(failure, PERMANENT_ERRORS) or not safe:
                raise KithUnreachableError(self.url, failure, maybe_done=not safe) from failure
            return backoff_s(attempt)
        problem = parse_problem(failure)
        from_server = problem["code"] not in (*PROXY_CODES, UNKNOWN_CODE)
        rejected = failure.status_code in BUSY_STATUSES and problem["code"] != AMBIGUOUS_CODE
        ambiguous = failure.status_code in BUSY_STATUSES or (
            failure.status_code in GATEWAY_STATUSES and not from_server
        )
        asked_s = parse_retry_after_s(failure.headers.get("retry-after"))
        if last or not (rejected or (ambiguous and call.repeatable)) or asked_s > MAX_DELAY_S:
            maybe_done = ambiguous and not rejected and not call.repeatable
            remedy = {"remedy": MAYBE_DONE_REMEDY} if maybe_done else {}
            raise KithClientError(failure.status_code, {**problem, **remedy}, maybe_done)
        return max(asked_s, backoff_s(attempt))

    def follow_delay_s(
        self, call: Call[object], failures: int, failure: httpx.Response | httpx.TransportError | None, connected: bool
    ) -> float:
        """Return the delay before an event stream connects again. ``failure``: None if the server ended the stream.

        Once it was ``connected``, it tries without end while the server is away or busy.

        Raises as :meth:`delay_s`.
        """
        if failure is None:
            return backoff_s(failures)
        if not connected:
            return self.delay_s(call, failures, failure)
        waits = RetryPolicy(self.url, failures + 2)
        return waits.delay_s(call, failures, failure)


def backoff_s(attempt: int) -> float:
    """Return an exponential delay with jitter, so that rejected clients do not return all at once."""
    return min(MAX_DELAY_S, INITIAL_DELAY_S * 2.0**attempt) * random.uniform(0.5, 1.0)


def parse_retry_after_s(header: str | None) -> float:
    """Parse Retry-After, in seconds or as a date (RFC 9110, 10.2.3). Return 0 for a missing or malformed header."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def parse_problem(response: httpx.Response) -> Mapping[str, Any]:
    """Return the problem document of a failed response; for another body, such as a proxy's, the code ``unknown``."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    document = body if isinstance(body, dict) else {}
    if isinstance(document.get("code"), str):
        return document
    return {"detail": f"HTTP {response.status_code}", **document, "code": UNKNOWN_CODE, "remedy": UNKNOWN_REMEDY}

"""Retry policy of the client.

Every call is retried after a rejection (429, or 503 from a server that did nothing). After a lost connection or a
timeout the server may have completed the call, so only repeatable calls are retried.
"""

from __future__ import annotations

import random
from typing import Any, Final

import httpx2 as httpx

from kith.errors import MAYBE_DONE_REMEDY, UNKNOWN_CODE, KithClientError, KithUnreachableError, parse_problem
from kith.requests import Call

INITIAL_DELAY_S: Final = 0.2
JITTER: Final = random.SystemRandom()
"""Leaves the random numbers of the program that uses the client as they are."""
MAX_DELAY_S: Final = 30.0
"""Maximum delay between two attempts. The client gives up if Retry-After asks for more."""
BUSY_STATUSES: Final = frozenset({429, 503})
GATEWAY_STATUSES: Final = frozenset({502, 504})
"""Statuses of a proxy whose connection to the server was lost or timed out."""
PROXY_CODES: Final = frozenset({"node_lost", "node_silent", UNKNOWN_CODE})
"""Codes of a proxy: those of docker/haproxy.cfg, and that of a body which is not Kith's."""
AMBIGUOUS_CODE: Final = "storage_unavailable"
"""The code with status 503 after which the change may have been committed."""
PERMANENT_ERRORS: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
UNSENT_ERRORS: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, *PERMANENT_ERRORS)


def retry_s(call: Call[Any], attempt: int, attempts: float, failure: httpx.Response | httpx.TransportError) -> float:
    """Return the delay before the next attempt. ``attempt`` counts from 0, ``attempts`` is the maximum number.

    Raises:
        KithClientError, KithUnreachableError: the call is not retried.
    """
    again = attempt + 1 < attempts
    if isinstance(failure, httpx.TransportError):
        safe = call.repeatable or isinstance(failure, UNSENT_ERRORS)
        if again and safe and not isinstance(failure, PERMANENT_ERRORS):
            return backoff_s(attempt)
        raise KithUnreachableError(failure, maybe_done=not safe) from failure
    problem = parse_problem(failure)
    busy = failure.status_code in BUSY_STATUSES
    rejected = busy and problem["code"] != AMBIGUOUS_CODE
    ambiguous = busy or (failure.status_code in GATEWAY_STATUSES and problem["code"] in PROXY_CODES)
    asked_s = parse_retry_after_s(failure.headers.get("retry-after"))
    if again and (rejected or (ambiguous and call.repeatable)) and asked_s <= MAX_DELAY_S:
        return max(asked_s, backoff_s(attempt))
    maybe_done = ambiguous and not rejected and not call.repeatable
    remedy = {"remedy": MAYBE_DONE_REMEDY} if maybe_done else {}
    raise KithClientError(failure.status_code, {**problem, **remedy}, maybe_done)


def backoff_s(attempt: int) -> float:
    """Return an exponential delay with jitter, so that rejected clients do not return all at once."""
    return min(MAX_DELAY_S, INITIAL_DELAY_S * 2.0 ** min(attempt, 16)) * JITTER.uniform(0.5, 1.0)


def parse_retry_after_s(header: str | None) -> float:
    """Parse Retry-After in seconds, as Kith and proxies send it. Return 0 for a missing or another header."""
    return float(header) if header is not None and header.strip().isdecimal() else 0.0

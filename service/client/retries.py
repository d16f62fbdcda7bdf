"""Whether a call that failed is made again, and when. Pure but for the dice.

A refusal (429, and 503 of a service that did nothing) is tried again whatever the call; where the connection broke, or
the time was up, it may have been done, and only what may be done twice is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx2 as httpx

from service.client.errors import LOOK_FIRST, NOT_KITHS, KithClientError, KithUnreachableError
from service.client.requests import Call

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 30.0
"""Of what the client waits between two attempts; who is told to wait for longer gives up at once."""
BUSY: Final = frozenset({429, 503})
BROKEN: Final = frozenset({502, 504})
"""What a proxy answers where the connection to the service broke, or was too slow."""
PROXYS: Final = frozenset({"node_lost", "node_silent"})
"""The codes that docker/haproxy.cfg gives these; another code is the service's, which is not broken."""
UNKNOWN: Final = "unknown"
MAYBE_DONE: Final = "storage_unavailable"
"""Of the codes that come with 503, the one of what may have been committed all the same."""
IMPOSSIBLE: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
"""What cannot be sent now cannot be later."""
NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, *IMPOSSIBLE)


@dataclass(frozen=True)
class Retries:
    """``url``: the server's; ``attempts``: in all."""

    url: str
    attempts: int

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError("attempts counts the first one: it is at least 1")

    def pause_s(self, call: Call[object], attempt: int, failed: httpx.Response | httpx.TransportError) -> float:
        """How long to wait after attempt number ``attempt``, from 0.

        Raises:
            KithClientError, KithUnreachableError: there is no further one.
        """
        over = attempt + 1 >= self.attempts
        if isinstance(failed, httpx.TransportError):
            lost = isinstance(failed, NEVER_SENT)
            if over or isinstance(failed, IMPOSSIBLE) or not (lost or call.repeatable):
                raise KithUnreachableError(self.url, failed, not (lost or call.repeatable)) from failed
            return backoff_s(attempt)
        problem = problem_of(failed)
        known = problem["code"] not in (*PROXYS, UNKNOWN)
        harmless = failed.status_code in BUSY and problem["code"] != MAYBE_DONE
        ambiguous = failed.status_code in BUSY or (failed.status_code in BROKEN and not known)
        asked_s = retry_after_s(failed.headers.get("retry-after"))
        if over or not (harmless or (ambiguous and call.repeatable)) or asked_s > LONGEST_PAUSE_S:
            maybe_done = ambiguous and not harmless and not call.repeatable
            raise KithClientError(
                failed.status_code, {**problem, **({"remedy": LOOK_FIRST} if maybe_done else {})}, maybe_done
            )
        return max(asked_s, backoff_s(attempt))


def backoff_s(attempt: int) -> float:
    """Doubling, and not all at once: many clients that were refused together come back one by one."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt) * random.uniform(0.5, 1.0)


def retry_after_s(header: str | None) -> float:
    """Of seconds or a date (RFC 9110, 10.2.3); 0 where there is none that can be read."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def problem_of(response: httpx.Response) -> Mapping[str, Any]:
    """What a failed answer says; a proxy's may say nothing, and then has the code ``unknown``."""
    try:
        document = response.json()
    except (ValueError, RecursionError):
        document = None
    said = document if isinstance(document, dict) else {}
    if isinstance(said.get("code"), str):
        return said
    return {"detail": f"HTTP {response.status_code}", **said, "code": UNKNOWN, "remedy": NOT_KITHS}

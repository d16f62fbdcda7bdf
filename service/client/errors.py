"""What a caller of the client is told when a call fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class KithClientError(Exception):
    """The service refused or failed. ``status``: of HTTP, 0 where there was no answer; ``code``: stable, docs/errors.md
    lists them; ``problem``: the whole document (RFC 9457)."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.code = str(problem.get("code", "unknown"))
        self.problem = dict(problem)
        sentences = [str(problem[part]).rstrip(".") + "." for part in ("detail", "remedy") if problem.get(part)]
        super().__init__(f"{self.code}: {' '.join(sentences)}")


class KithUnreachableError(KithClientError):
    """No answer: the server is not there, the connection broke, or the time was up. ``maybe_done``: the request may
    have reached the server, and it is one that is not repeated by itself."""

    def __init__(self, url: str, cause: Exception, maybe_done: bool = False) -> None:
        self.maybe_done = maybe_done
        remedy = (
            "It may have been done all the same: look before you repeat it."
            if maybe_done
            else "Is a server running there, and does the address begin with http:// or https://?"
        )
        detail = f"no answer from {url} ({cause or type(cause).__name__})"
        super().__init__(0, {"code": "unreachable", "detail": detail, "remedy": remedy})

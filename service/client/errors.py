"""What a caller of the client is told when a call fails."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

NOT_KITHS: Final = "This does not look like Kith: check the address, and what is between."
LOOK_FIRST: Final = "It may have been done all the same: look before you repeat it."


class KithClientError(Exception):
    """The service refused or failed. ``status``: of HTTP, 0 where there was no answer; ``code``: stable, docs/errors.md
    lists them; ``problem``: the whole document (RFC 9457); ``maybe_done``: the request may have been done all the
    same, and it is one that is not repeated by itself."""

    def __init__(self, status: int, problem: Mapping[str, Any], maybe_done: bool = False) -> None:
        self.status = status
        self.maybe_done = maybe_done
        self.code = str(problem.get("code", "unknown"))
        self.problem = dict(problem)
        sentences = [str(problem[part]).rstrip(".") + "." for part in ("detail", "remedy") if problem.get(part)]
        super().__init__(f"{self.code}: {' '.join(sentences)}")


class KithUnreachableError(KithClientError):
    """No answer: the server is not there, the connection broke, or the time was up."""

    def __init__(self, url: str, cause: Exception, maybe_done: bool = False) -> None:
        remedy = (
            LOOK_FIRST
            if maybe_done
            else "Is a server running there, and does the address begin with http:// or https://?"
        )
        detail = f"no answer from {without_userinfo(url)} ({cause or type(cause).__name__})"
        super().__init__(0, {"code": "unreachable", "detail": detail, "remedy": remedy}, maybe_done)


def without_userinfo(url: str) -> str:
    """For messages, which are logged: a password may be in it."""
    return re.sub(r"//[^/?#]*@", "//", url)


def not_kiths(status: int) -> KithClientError:
    """An answer that nothing can be read of. What it is instead is not quoted: it may be anything."""
    detail = f"HTTP {status}, with a content that is none of Kith's"
    return KithClientError(status, {"code": "unknown", "detail": detail, "remedy": NOT_KITHS})

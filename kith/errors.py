"""Exceptions of the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx2 as httpx

UNKNOWN_CODE: Final = "unknown"
UNKNOWN_REMEDY: Final = "This does not look like Kith. Check the address and any proxy."
MAYBE_DONE_REMEDY: Final = "The server may have completed the request. Check before you repeat it."
UNREACHABLE_REMEDY: Final = "Check that the server runs and that the address begins with http:// or https://."


class KithClientError(Exception):
    """The server refused the request or failed, or the client did not send it.

    Attributes:
        status: HTTP status; 0 without a response.
        code: stable error code (docs/errors.md).
        problem: the whole problem document (RFC 9457).
        maybe_done: the server may have completed the request, and the client does not retry it.
    """

    def __init__(self, status: int, problem: Mapping[str, Any], maybe_done: bool = False) -> None:
        self.status = status
        self.maybe_done = maybe_done
        self.code = str(problem.get("code", UNKNOWN_CODE))
        self.problem = dict(problem)
        texts = (problem.get("detail"), problem.get("remedy"))
        sentences = [str(text).rstrip(".") + "." for text in texts if text]
        super().__init__(f"{self.code}: {' '.join(sentences)}")


class KithUnreachableError(KithClientError):
    """The server did not respond: no connection, a lost connection, or a timeout."""

    def __init__(self, cause: httpx.RequestError, maybe_done: bool = False) -> None:
        server = cause.request.url.copy_with(userinfo=b"", raw_path=b"/")  # the path may name a person
        detail = f"no response from {str(server).rstrip('/')} ({str(cause) or type(cause).__name__})"
        remedy = MAYBE_DONE_REMEDY if maybe_done else UNREACHABLE_REMEDY
        super().__init__(0, {"code": "unreachable", "detail": detail, "remedy": remedy}, maybe_done)


def local_error(code: str, detail: str, remedy: str) -> KithClientError:
    """Build the error of a request that the client does not send."""
    return KithClientError(0, {"code": code, "detail": detail, "remedy": remedy})


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


def unknown_response_error(status: int) -> KithClientError:
    """Build the error for a response that is not Kith's. The content is not quoted, because it may hold secrets."""
    detail = f"HTTP {status} with an unexpected body"
    return KithClientError(status, {"code": UNKNOWN_CODE, "detail": detail, "remedy": UNKNOWN_REMEDY})

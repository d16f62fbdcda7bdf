"""Exceptions of the client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

UNKNOWN_CODE: Final = "unknown"
UNKNOWN_REMEDY: Final = "This does not look like Kith. Check the address and any proxy."
MAYBE_DONE_REMEDY: Final = "The server may have completed the request. Check before you repeat it."
UNREACHABLE_REMEDY: Final = "Check that the server runs and that the address begins with http:// or https://."


REMEDIES: Final = {
    "unauthorized": "Pass api_key, or set KITH_CLIENT_KEY or KITH_API_KEY.",
    "gallery_not_found": "List the galleries with galleries(), or create it with create_gallery().",
    "gallery_exists": "Use it with exist_ok=True, or choose another name.",
    "subject_not_found": "Check the id. put_subject() or enroll() creates the subject.",
    "subject_exists": "Choose another id. To update the existing subject, omit only_new.",
    "precondition_failed": "Read it again, make the change to what it is now, and pass its new etag as if_match.",
    "key_not_found": "List the keys with api_keys().",
    "webhook_not_found": "List the webhooks with webhooks().",
    "job_not_found": "List the jobs with jobs(). Finished jobs are deleted after two weeks.",
    "model_not_served": "model() returns the served packs. Add packs with KITH_EXTRA_PACKS on the server.",
    "several_faces": 'Crop the photo to one person, or pass face="largest".',
    "duplicate_subject": "Enroll it for that subject, or pass allow_duplicate=True.",
    "inconsistent_template": "Check the photo, or pass allow_inconsistent=True.",
    "idempotency_conflict": "Use a new idempotency_key for each new request.",
    "album_group_unnamed": "Name the group first with name_album_group().",
}
"""Remedies in terms of the client. The server's own are about HTTP."""
FIELD_PREFIX: Final = re.compile(r"(^|; )(?:body|path|query)\.")
ARGUMENTS: Final = {"images": "photos", "tag": "tags", "state": "states", "template_count": "templates"}
"""Arguments of the client's methods that have another name than the field of the request."""
FIELD: Final = re.compile(rf"(^|; )({'|'.join(ARGUMENTS)})\b(?=[.\[:])")


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
        texts = (_detail_for(self.code, problem), _remedy_for(self.code, problem))
        sentences = [str(text).rstrip(".") + "." for text in texts if text]
        super().__init__(f"{self.code}: {' '.join(sentences)}")


class KithUnreachableError(KithClientError):
    """The server did not respond: no connection, a lost connection, or a timeout."""

    def __init__(self, url: str, cause: Exception, maybe_done: bool = False) -> None:
        detail = f"no response from {remove_userinfo(url)} ({cause or type(cause).__name__})"
        remedy = MAYBE_DONE_REMEDY if maybe_done else UNREACHABLE_REMEDY
        super().__init__(0, {"code": "unreachable", "detail": detail, "remedy": remedy}, maybe_done)


def _detail_for(code: str, problem: Mapping[str, Any]) -> object:
    """Return the detail with the names of the client's arguments, not with their places in the request."""
    if code != "invalid_request" or not problem.get("detail"):
        return problem.get("detail")
    detail = FIELD_PREFIX.sub(r"\1", str(problem["detail"]))
    return FIELD.sub(lambda found: found[1] + ARGUMENTS[found[2]], detail)


def _remedy_for(code: str, problem: Mapping[str, Any]) -> object:
    """Return the client's remedy, else the server's. Only the operator can replace a revoked or expired key."""
    remedy = problem.get("remedy")
    return remedy if str(remedy).startswith("Ask ") else REMEDIES.get(code) or remedy


def local_error(code: str, detail: str, remedy: str) -> KithClientError:
    """Build the error of a request that the client does not send."""
    return KithClientError(0, {"code": code, "detail": detail, "remedy": remedy})


def unknown_response_error(status: int) -> KithClientError:
    """Build the error for a response that is not Kith's. The content is not quoted, because it may hold secrets."""
    detail = f"HTTP {status} with an unexpected body"
    return KithClientError(status, {"code": UNKNOWN_CODE, "detail": detail, "remedy": UNKNOWN_REMEDY})


def remove_userinfo(url: str) -> str:
    """Remove the user name and password from a URL, because messages are logged."""
    return re.sub(r"//[^/?#]*@", "//", url)

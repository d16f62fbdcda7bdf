"""Content codings of request bodies (RFC 9110, 8.4). Pure functions."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers

from service.core.errors import UnsupportedEncodingError

IMPORT_CODINGS: Final = ("gzip",)
"""Codings of imports, which are decoded."""
ARCHIVE_CODINGS: Final = ("gzip", "zstd")
"""Codings of archives. An archive is recognized by content, so that a coding is the compression of its tar."""
NO_CODINGS: Final = frozenset({"", "identity"})
ALIASES: Final = {"x-gzip": "gzip"}


def content_coding(headers: Headers, accepted: tuple[str, ...] = ()) -> str | None:
    """Return the content coding of a body, None if it has none.

    Args:
        headers: of the request.
        accepted: codings that the caller decodes, in lower case.

    Raises:
        UnsupportedEncodingError: The body has another coding, or several.
    """
    named = [coding.strip().lower() for value in headers.getlist("content-encoding") for coding in value.split(",")]
    codings = [ALIASES.get(coding, coding) for coding in named if coding not in NO_CODINGS]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in accepted:
        supported = ", ".join((*accepted, "identity"))
        raise UnsupportedEncodingError(
            f"Content-Encoding: {', '.join(codings)[:80]!r}; this path supports: {supported}", supported
        )
    return codings[0]

"""ETags and conditional requests (RFC 9110, 13).

An ETag is REVISION.VIEW. ``If-Match`` compares the revision, which is what a request can change; ``If-None-Match``
compares all: a photo that was enrolled meanwhile makes an answer stale, and refuses no change of a name.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from fastapi import Depends, Header, Request, Response

from service.core.errors import InvalidRequestError
from service.domain.revisions import ANY

TAGS: Final = re.compile(r'(?:W/)?"([^"]*)"')
"""Proxies that compress a response mark its ETag as weak. The revision in it stays exact."""


async def _expected(
    if_match: Annotated[
        str | None,
        Header(
            alias="If-Match",
            max_length=1000,
            description="`etag` of the answer that the change is based on; 412 `precondition_failed` if another caller "
            "changed it since. `*`: only if it exists.",
        ),
    ] = None,
) -> frozenset[str] | None:
    if if_match is None:
        return None
    if if_match.strip() == ANY:
        return frozenset({ANY})
    revisions = frozenset(tag.partition(".")[0] for tag in TAGS.findall(if_match))
    if not revisions:
        raise InvalidRequestError('If-Match: must be the ETag of an earlier response with its quotation marks, or "*"')
    return revisions


IfMatch = Annotated[frozenset[str] | None, Depends(_expected)]
"""Expected revisions, as ``service.domain.revisions.require_revision`` takes them."""


def is_fresh(request: Request, etag: str) -> bool:
    """Return whether the client has the response with this ETag."""
    known = request.headers.get("if-none-match", "")
    return known.strip() == ANY or etag.strip('"') in TAGS.findall(known)


def without_fresh_body(request: Request, response: Response) -> Response:
    """Return 304 in place of a response that the client has."""
    etag = response.headers.get("etag")
    if request.method != "GET" or response.status_code != 200 or etag is None:
        return response
    response.headers.setdefault("cache-control", "private, no-cache")
    if not is_fresh(request, etag):
        return response
    kept = {name: value for name, value in response.headers.items() if name in ("etag", "cache-control", "vary")}
    return Response(status_code=304, headers=kept)

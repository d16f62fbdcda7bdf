"""Multipart bodies, read as they come: each part's bytes once, in memory, since every photo is decoded from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header
from starlette.requests import Request

from service.errors import InvalidRequestError

MOST_FIELDS: Final = 4
MOST_FIELD_BYTES: Final = 1_048_576
"""Of a part that is no file."""


@dataclass(frozen=True)
class Part:
    name: str
    is_file: bool
    payload: bytes


async def read_parts(request: Request, max_files: int, max_file_bytes: int) -> list[Part]:
    """Every part of a multipart body, in order; of a file that is too large one byte more than it may have, by which it
    is known as such. Raises InvalidRequestError."""
    _, options = parse_options_header(request.headers.get("content-type", ""))
    parts: list[Part] = []
    opened: MultipartSegment | None = None
    pieces: list[bytes] = []
    held = 0
    left = {True: max_files, False: MOST_FIELDS}
    try:
        with PushMultipartParser(options.get("boundary", "")) as parser:
            async for chunk in request.stream():
                # An empty chunk, which is how a body ends here, would end the form there.
                for event in parser.parse(chunk) if chunk else ():
                    if isinstance(event, MultipartSegment):
                        opened, pieces, held = event, [], 0
                        left[_is_file(event)] -= 1
                        if min(left.values()) < 0:
                            raise InvalidRequestError(
                                f"the form has more than {max_files} files or {MOST_FIELDS} fields"
                            )
                    elif opened is not None and event is not None:
                        kept = bytes(event[: max_file_bytes + 1 - held])
                        held += len(kept)
                        if kept:
                            pieces.append(kept)
                        if not _is_file(opened) and opened.bytes_received > MOST_FIELD_BYTES:
                            raise InvalidRequestError(f"a form field has more than {MOST_FIELD_BYTES} bytes")
                    elif opened is not None:
                        parts.append(Part(opened.name or "", _is_file(opened), b"".join(pieces)))
                        pieces = []
    except MultipartError as error:
        raise InvalidRequestError(f"the form cannot be read: {error.args[0]}") from error
    return parts


def _is_file(segment: MultipartSegment) -> bool:
    return segment.filename is not None

"""Description of one API call before it is sent, independent of sync or async transport."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from kith.errors import local_error
from kith.photos import Photo, Vector, encode_photo, to_floats
from kith.wire.fields import Page

Result = TypeVar("Result", covariant=True)
Item = TypeVar("Item")
Response = TypeVar("Response", bound=BaseModel)
LAST_EVENT_ID: Final = "Last-Event-ID"
CHUNK_BYTES: Final = 1_000_000


class Archive(Protocol):
    """Body that can be iterated again for a retry; ``size`` is its length in bytes."""

    size: int

    def __iter__(self) -> Iterator[bytes]: ...


class FileStream:
    """Content of a file in chunks, for one upload with its retries.

    ``progress`` is called with the number of bytes of each sent chunk, once: a retry counts only what is new."""

    def __init__(self, path: Path, progress: Callable[[int], object] = lambda _: None) -> None:
        self._path = path
        self._progress = progress
        self._counted = 0
        self.size = path.stat().st_size

    def __iter__(self) -> Iterator[bytes]:
        sent = 0
        with self._path.open("rb") as file:
            while block := file.read(CHUNK_BYTES):
                yield block
                sent += len(block)
                if sent > self._counted:
                    new, self._counted = sent - self._counted, sent
                    self._progress(new)


@dataclass(frozen=True)
class Call(Generic[Result]):
    """One API call.

    Attributes:
        parse: converts the response body, a chunk of it, or an event of a stream, to the result.
        arguments: keyword arguments for httpx.
        stream: request body, read while it is sent.
        repeatable: a repetition changes nothing and returns the same response.
        long_running: the response may take longer than the read timeout.
        instead: call whose result counts if the server refuses this one, by the code of the refusal.
    """

    method: str
    path: str
    parse: Callable[[Any], Result]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    stream: Iterable[bytes] | None = None
    repeatable: bool = True
    long_running: bool = False
    instead: Mapping[str, Call[Result]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pages(Generic[Item]):
    """Paginated list. ``page`` maps a cursor to the call that returns that page."""

    page: Callable[[str | None], Call[Page[Item]]]


def path_segment(text: str) -> str:
    """Escape an id for use as one segment of a URL path.

    Escaping cannot protect every id: '..' and '%2E%2E' are equivalent (RFC 3986, 6.2.2), and many servers decode '%2F'
    to '/'. The request would then address another resource, so such ids are refused.

    Raises:
        KithClientError: ``invalid_request``, before anything is sent.
    """
    if text in ("", ".", "..") or any(c in "/\\" or unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise local_error(
            "invalid_request",
            f"{text!r} cannot be part of an address",
            "A name or id is not empty, '.' or '..', and has no slashes, backslashes or control characters.",
        )
    return quote(text, safe="")


def texts(argument: str, values: Iterable[str]) -> list[str]:
    """Return texts as a list. One text would be sent as its letters, so it is refused.

    Raises:
        KithClientError: ``invalid_request``, before anything is sent.
    """
    if isinstance(values, str):
        raise local_error("invalid_request", f"{argument} is one text", f"Pass a list: {argument}=[{values!r}].")
    return list(values)


def photo_arguments(
    photos: Sequence[Photo],
    urls: Sequence[str],
    embeddings: Sequence[Vector],
    headers: Mapping[str, str],
    **options: Any,
) -> dict[str, Any]:
    """Build the httpx arguments for photos and options: one photo as a raw body, which costs the server least.

    Proxies log URLs. So lists and objects but the risk, which may name people, are in a form with the photo."""
    options |= {"urls": urls} if urls else {}
    options |= {"embeddings": [to_floats(vector) for vector in embeddings]} if len(embeddings) else {}
    if not photos:
        return {"json": options, "headers": headers}
    plain = {name: value for name, value in options.items() if name != "risk"} | options.get("risk", {})
    if len(photos) == 1 and all(isinstance(value, str | Number) for value in plain.values()):
        headers = {**headers, "Content-Type": "application/octet-stream"}
        return {"content": encode_photo(photos[0]), "params": plain, "headers": headers}
    files = [("images", ("photo", encode_photo(photo))) for photo in photos]
    request = {"request": json.dumps(options)} if options else {}
    return {"files": files, "data": request, "headers": headers}


def drop_none(**options: Any) -> dict[str, Any]:
    """Return the options that are not None. The server has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None}


def json_call(
    model: type[Response], method: str, path: str, repeatable: bool = True, **arguments: Any
) -> Call[Response]:
    """Describe a call whose response is parsed as ``model``."""
    return Call(method, path, model.model_validate_json, arguments, repeatable=repeatable)


def list_call(model: type[Page[Item]], path: str, params: Mapping[str, Any] | None = None) -> Pages[Item]:
    """Describe a paginated list."""

    def page(cursor: str | None) -> Call[Page[Item]]:
        return json_call(model, "GET", path, params={**(params or {}), **drop_none(cursor=cursor)})

    return Pages(page)

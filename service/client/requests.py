"""A call, before it is sent: what is asked, and how its answer is read. Pure but for files, which are read here."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar
from urllib.parse import quote

from service.client.errors import KithClientError
from service.client.photos import Photo, payload_of

Result = TypeVar("Result", covariant=True)
Item = TypeVar("Item")
PIECE_BYTES: Final = 1_000_000
BESIDE_A_PHOTO: Final = frozenset(
    {
        "allow_duplicate",
        "allow_inconsistent",
        "allow_low_quality",
        "allow_not_live",
        "check_quality",
        "face",
        "faces",
        "model",
        "recogniser",
        "risk",
        "top_k",
    }
)
"""Options that may stand in an address, which proxies write into their logs: not what is known of people."""


class Archive(Protocol):
    """Bytes that are sent as they are made, again if need be; ``size``: how many."""

    size: int

    def __iter__(self) -> Iterator[bytes]: ...


class FileStream:
    """A file's bytes; ``progress`` is told of each piece that was sent."""

    def __init__(self, path: Path, progress: Callable[[int], object] = lambda _: None) -> None:
        self._path = path
        self._progress = progress
        self.size = path.stat().st_size

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            while block := file.read(PIECE_BYTES):
                yield block
                self._progress(len(block))


@dataclass(frozen=True)
class Call(Generic[Result]):
    """``read``: the answer's bytes to what the caller gets. ``arguments``: of httpx, that say what is sent beside
    ``pieces``, a body that is made while it is sent. ``repeatable``: once done, doing it again changes nothing, and
    gives the same answer. ``patient``: the answer comes after long work."""

    method: str
    path: str
    read: Callable[[bytes], Result]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pieces: Iterable[bytes] | None = None
    repeatable: bool = True
    patient: bool = False


@dataclass(frozen=True)
class Pages(Generic[Item]):
    """A list that comes in pages. ``page``: that of a cursor; it is read as its items, and the cursor of the next."""

    page: Callable[[str | None], Call[tuple[Sequence[Item], str | None]]]


def part(text: str) -> str:
    """An id as it stands between two slashes of an address: whatever reads that on its way, it names nothing else. What
    does not stay one part is refused, for no escape helps it: '..' and '%2E%2E' are the same (RFC 3986, 6.2.2), and
    many take '%2F' for '/'.

    Raises:
        KithClientError: ``invalid_request``, before anything is sent.
    """
    if text in ("", ".", "..") or any(c in "/\\" or unicodedata.category(c) in ("Cc", "Cs") for c in text):
        detail = f"{text!r} names nothing: it cannot stand in an address"
        remedy = "No name or id is empty, '.' or '..', or has slashes, backslashes or control characters."
        raise KithClientError(0, {"code": "invalid_request", "detail": detail, "remedy": remedy})
    return quote(text, safe="")


def with_photos(
    photos: Sequence[Photo],
    urls: Sequence[str],
    options: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Arguments that send photos and options: one photo as it is, which costs the server least, several as a form."""
    options = {**options, **({"urls": list(urls)} if urls else {})}
    if not photos:
        return {"json": options, "headers": headers}
    asked = {"request": json.dumps(options)} if options else {}
    if len(photos) == 1 and BESIDE_A_PHOTO.issuperset(options):
        headers = {**(headers or {}), "Content-Type": "application/octet-stream"}
        return {"content": payload_of(photos[0]), "params": asked, "headers": headers}
    files = [("images", ("photo", payload_of(photo))) for photo in photos]
    return {"files": files, "data": asked, "headers": headers}


def given(**options: Any) -> dict[str, Any]:
    """Those that are not None: the server has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None}

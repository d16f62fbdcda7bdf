"""CompreFace's people and photos, out of what ``pg_dump`` writes of its PostgreSQL database.

Its tables (exadel-inc/CompreFace, changelogs 0.1.7 to 0.2.7): ``subject`` (id, api_key, subject_name), ``embedding``
(id, subject_id, embedding, calculator, img_id) and ``img`` (id, content); ``model`` names each face collection's
api_key. Its embeddings are of MXNet's or TensorFlow's networks and of its own crops, so that they compare with no
vectors that Kith makes: the photos are taken, where CompreFace kept them (``save_images_to_db``).
"""

from __future__ import annotations

import binascii
import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, cast

from service.errors import ForeignFileError
from service.foreign.people_archive import PersonPhoto
from service.foreign.subject_ids import SubjectIds

LONGEST_LINE: Final = 200_000_000
"""Bytes of a row: twice of a photo's, in hexadecimal digits."""
COPY: Final = re.compile(rb'COPY (?:"?\w+"?\.)?"?(\w+)"? \(([^)]*)\) FROM stdin;')
END: Final = b"\\."
NULL: Final = b"\\N"
ESCAPES: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)
CUSTOM_FORMAT: Final = b"PGDMP"
GZIP: Final = b"\x1f\x8b"

Row = dict[str, bytes | None]


@dataclass
class Collection:
    """One face collection of CompreFace. ``people``: their names by id; ``photos``: whose each is, by the photo's id;
    ``without_photo``: embeddings that were stored alone."""

    api_key: str
    name: str | None
    people: dict[str, str] = field(default_factory=dict)
    photos: dict[str, str] = field(default_factory=dict)
    without_photo: int = 0

    @property
    def title(self) -> str:
        return self.name or self.api_key


def read_collections(dump: Path) -> list[Collection]:
    """Face collections that hold people, without their photos.

    Raises:
        ForeignFileError: it is no dump of CompreFace's tables, or is cut short.
        OSError.
    """
    names: dict[str, str] = {}
    subjects: dict[str, tuple[str, str]] = {}
    owners: list[tuple[str, str | None]] = []
    seen: set[str] = set()
    for table, row in _rows(dump, {"model": (), "subject": (), "embedding": ("embedding",)}):
        seen.add(table)
        if table == "model":
            names[_text(row, "api_key")] = _text(row, "name")
        elif table == "subject":
            subjects[_text(row, "id")] = (_text(row, "api_key"), _text(row, "subject_name"))
        elif table == "embedding" and row.get("subject_id") is not None:
            owners.append((_text(row, "subject_id"), None if row.get("img_id") is None else _text(row, "img_id")))
    if "subject" not in seen:
        raise ForeignFileError(f"{dump.name} holds no rows of CompreFace's table 'subject'")
    found: dict[str, Collection] = {}
    for subject, (api_key, name) in subjects.items():
        collection = found.setdefault(api_key, Collection(api_key, names.get(api_key)))
        collection.people[subject] = name
    for subject, photo in owners:
        if subject not in subjects:
            raise ForeignFileError(f"{dump.name}: an embedding is of subject {subject}, who is not in the dump")
        collection = found[subjects[subject][0]]
        if photo is None:
            collection.without_photo += 1
        else:
            collection.photos[photo] = subject
    return list(found.values())


def read_photos(dump: Path, collection: Collection, ids: SubjectIds) -> Iterator[PersonPhoto]:
    """A collection's photos, one at a time. Raises as :func:`read_collections`, or that one is missing."""
    waiting = dict(collection.photos)
    for _, row in _rows(dump, {"img": ()}):
        photo = _text(row, "id")
        if (subject := waiting.pop(photo, None)) is None:
            continue
        yield PersonPhoto(ids.of(collection.people[subject]), photo, _bytes(row, dump))
    if waiting:
        raise ForeignFileError(f"{dump.name} lacks {len(waiting)} photos of the table 'img' that its embeddings name")


def _rows(dump: Path, wanted: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Row]]:
    """Table and row of each row of the tables, in the file's order, without the columns named."""
    with dump.open("rb") as file:
        beginning = file.read(len(CUSTOM_FORMAT))
    if beginning == CUSTOM_FORMAT:
        raise ForeignFileError(
            f"{dump.name} is in pg_dump's custom format", remedy=f"pg_restore -f dump.sql {dump.name} makes it SQL."
        )
    with _opened(dump, beginning) as lines:
        copies = 0
        try:
            while line := lines.readline(LONGEST_LINE):
                if (begun := COPY.match(line)) is None:
                    continue
                copies += 1
                table = begun[1].decode()
                columns = [column.strip().strip(b'"').decode() for column in begun[2].split(b",")]
                without = wanted.get(table)
                for values in _copied(lines, dump):
                    if without is None:
                        continue
                    if len(values) != len(columns):
                        raise ForeignFileError(f"{dump.name}: a row of {table!r} has not as many values as columns")
                    row = zip(columns, values, strict=True)
                    yield table, {column: _value(value) for column, value in row if column not in without}
        except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
            raise ForeignFileError(f"{dump.name} cannot be read: {error}") from error
        if copies == 0:
            raise ForeignFileError(f"{dump.name} holds no rows as pg_dump writes them (COPY ... FROM stdin)")


def _opened(dump: Path, beginning: bytes) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(dump)) if beginning.startswith(GZIP) else dump.open("rb")


def _copied(lines: IO[bytes], dump: Path) -> Iterator[list[bytes]]:
    while line := lines.readline(LONGEST_LINE):
        if not line.endswith(b"\n"):
            break
        if (row := line.removesuffix(b"\n").removesuffix(b"\r")) == END:
            return
        yield row.split(b"\t")
    raise ForeignFileError(f"{dump.name} is cut short, or has a row of more than {LONGEST_LINE:,} bytes")


def _value(text: bytes) -> bytes | None:
    """As PostgreSQL's COPY escapes it (its documentation, COPY, 'Text Format')."""
    if text == NULL:
        return None
    return ESCAPED.sub(lambda found: ESCAPES.get(found[1], found[1]), text) if b"\\" in text else text


def _text(row: Row, column: str) -> str:
    if (value := row.get(column)) is None:
        raise ForeignFileError(f"a row lacks {column!r}: these are not CompreFace's tables")
    return value.decode("utf-8")


def _bytes(row: Row, dump: Path) -> bytes:
    content = row.get("content") or b""
    try:
        if not content.startswith(b"\\x"):
            raise ValueError("photos must be in hexadecimal digits (bytea_output = hex)")
        return binascii.unhexlify(content[2:])
    except ValueError as error:
        raise ForeignFileError(f"{dump.name}: a row of 'img' cannot be read: {error}") from error

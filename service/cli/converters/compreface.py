"""Reader of CompreFace's people and photos in a ``pg_dump`` of its PostgreSQL database.

Tables (exadel-inc/CompreFace, changelogs 0.1.7 to 0.2.7): ``subject`` (id, api_key, subject_name), ``embedding``
(id, subject_id, embedding, calculator, img_id), ``img`` (id, content), and ``model``, which names the api_key of each
face collection. CompreFace's embeddings come from other networks and crops, so they cannot be compared with Kith's.
The reader takes the photos, which CompreFace stores if ``save_images_to_db`` is set.
"""

from __future__ import annotations

import binascii
import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, cast

from service.cli.converters.output import PersonPhoto, SubjectIds
from service.core.errors import LocalError

MAX_LINE_BYTES: Final = 200_000_000
"""Size limit of a row. A photo takes two hexadecimal digits per byte."""
COPY: Final = re.compile(rb'COPY (?:"?\w+"?\.)?"?(\w+)"? \(([^)]*)\) FROM stdin;')
END: Final = b"\\."
NULL: Final = b"\\N"
ESCAPES: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)
CUSTOM_FORMAT: Final = b"PGDMP"
GZIP: Final = b"\x1f\x8b"

Row = dict[str, bytes | None]


@dataclass
class CompreFaceCollection:
    """Face collection.

    Attributes:
        people: name by subject id.
        photos: subject id by photo id.
        without_photo: number of embeddings stored without a photo.
    """

    api_key: str
    name: str | None
    people: dict[str, str] = field(default_factory=dict)
    photos: dict[str, str] = field(default_factory=dict)
    without_photo: int = 0

    @property
    def title(self) -> str:
        return self.name or self.api_key


def read_collections(dump: Path) -> list[CompreFaceCollection]:
    """Return the face collections that have subjects, without the content of photos.

    Raises:
        foreign_file: the file is not a dump of CompreFace's tables, or is truncated.
        OSError: the file cannot be read.
    """
    names: dict[str, str] = {}
    subjects: dict[str, tuple[str, str]] = {}
    embeddings: list[tuple[str, str | None]] = []
    for table, row in _rows(dump, {"model": (), "subject": (), "embedding": ("embedding",)}):
        if table == "model":
            names[_text(row, "api_key")] = _text(row, "name")
        elif table == "subject":
            subjects[_text(row, "id")] = (_text(row, "api_key"), _text(row, "subject_name"))
        elif table == "embedding" and row.get("subject_id") is not None:
            embeddings.append((_text(row, "subject_id"), None if row.get("img_id") is None else _text(row, "img_id")))
    if not subjects:
        raise _foreign(f"{dump.name} has no rows of CompreFace's table 'subject'")
    found: dict[str, CompreFaceCollection] = {}
    for subject, (api_key, name) in subjects.items():
        collection = found.setdefault(api_key, CompreFaceCollection(api_key, names.get(api_key)))
        collection.people[subject] = name
    for subject, photo in embeddings:
        collection = found[subjects[subject][0]]
        if photo is None:
            collection.without_photo += 1
        else:
            collection.photos[photo] = subject
    return list(found.values())


def read_photos(dump: Path, collection: CompreFaceCollection, ids: SubjectIds) -> Iterator[PersonPhoto]:
    """Yield a collection's photos, one at a time.

    Raises:
        foreign_file: as :func:`read_collections`, or a photo is missing.
    """
    expected = dict(collection.photos)
    for _, row in _rows(dump, {"img": ()}):
        photo = _text(row, "id")
        if (subject := expected.pop(photo, None)) is None:
            continue
        yield PersonPhoto(ids.id_for(collection.people[subject]), photo, _photo_content(row, dump))
    if expected:
        raise _foreign(f"{dump.name} lacks {len(expected)} photos of the table 'img' that embeddings refer to")


def _foreign(problem: str) -> LocalError:
    return LocalError("foreign_file", problem)


def _rows(dump: Path, excluded: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Row]]:
    """Yield table name and row for each table in ``excluded``, without that table's excluded columns."""
    with dump.open("rb") as file:
        start = file.read(len(CUSTOM_FORMAT))
    if start == CUSTOM_FORMAT:
        raise LocalError(
            "foreign_file",
            f"{dump.name} is in pg_dump's custom format",
            remedy=f"Convert it: pg_restore -f dump.sql {dump.name}",
        )
    with _open(dump, start) as lines:
        try:
            while line := lines.readline(MAX_LINE_BYTES):
                if (copy := COPY.match(line)) is None:
                    continue
                table = copy[1].decode()
                columns = [column.strip().strip(b'"').decode() for column in copy[2].split(b",")]
                for values in _copied_rows(lines, dump):
                    if table not in excluded:
                        continue
                    row = zip(columns, values, strict=True)
                    yield table, {column: _unescape(value) for column, value in row if column not in excluded[table]}
        except (gzip.BadGzipFile, EOFError, ValueError) as error:
            raise _foreign(f"{dump.name} cannot be read: {error}") from error


def _open(dump: Path, start: bytes) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(dump)) if start.startswith(GZIP) else dump.open("rb")


def _copied_rows(lines: IO[bytes], dump: Path) -> Iterator[list[bytes]]:
    while line := lines.readline(MAX_LINE_BYTES):
        if not line.endswith(b"\n"):
            break
        if (row := line.removesuffix(b"\n").removesuffix(b"\r")) == END:
            return
        yield row.split(b"\t")
    raise _foreign(f"{dump.name} is truncated, or has a row of more than {MAX_LINE_BYTES:,} bytes")


def _unescape(text: bytes) -> bytes | None:
    """Decode a value of PostgreSQL's COPY (documentation of COPY, 'Text Format')."""
    if text == NULL:
        return None
    return ESCAPED.sub(lambda found: ESCAPES.get(found[1], found[1]), text) if b"\\" in text else text


def _text(row: Row, column: str) -> str:
    if (value := row.get(column)) is None:
        raise _foreign(f"a row lacks {column!r}: these are not CompreFace's tables")
    return value.decode("utf-8")


def _photo_content(row: Row, dump: Path) -> bytes:
    content = row.get("content") or b""
    try:
        if not content.startswith(b"\\x"):
            raise ValueError("photos must be hexadecimal (bytea_output = hex)")
        return binascii.unhexlify(content[2:])
    except ValueError as error:
        raise _foreign(f"{dump.name}: a row of 'img' cannot be read: {error}") from error

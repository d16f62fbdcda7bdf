"""Search for secrets in all files of a folder, in every encoding that they may have."""

from __future__ import annotations

import base64
import io
import json
import urllib.parse
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from models.runtime.network import Float
from service.core.unpacking import ZstdFile
from service.storage.db.tables import metadata
from service.storage.privacy.backup import read_manifest
from service.storage.privacy.backup_rows import read_rows

WINDOW_BYTES = 24
WINDOWS = 8
"""Windows of a photo's bytes. Each one identifies the photo."""
NUMBERS = 6
"""Numbers of a vector to search for."""
Needles = Mapping[str, list[bytes]]


def forms_of_text(text: str) -> list[bytes]:
    """Return a text's encodings: plain, JSON, percent-encoded, UTF-16 and base64."""
    plain = text.encode()
    written = {plain, json.dumps(text)[1:-1].encode(), text.encode("utf-16-le"), plain.hex().encode()}
    return [*written, urllib.parse.quote(text).encode(), *_in_base64(plain)]


def forms_of_bytes(payload: bytes) -> list[bytes]:
    """Return distinctive windows of a photo's bytes."""
    last = len(payload) - WINDOW_BYTES
    places = np.linspace(min(700, last // 2), last, WINDOWS).astype(int)
    windows = [payload[place : place + WINDOW_BYTES] for place in places]
    return [
        form for window in windows if len(set(window)) > WINDOW_BYTES // 2 for form in (window, *_in_base64(window))
    ]


def forms_of_vector(vector: Float) -> list[bytes]:
    """Return a vector's first numbers as float16, float32 and float64, and as decimal digits."""
    first = np.asarray(vector[:NUMBERS], np.float32)
    binary = [first.astype(kind).tobytes() for kind in ("<f2", "<f4", "<f8", ">f4")]
    decimal = [f"{abs(number):.6f}"[1:].encode() for number in first[:3].tolist() if abs(number) > 0.01]
    return [*binary, *_in_base64(binary[1]), *decimal]


def _in_base64(payload: bytes) -> list[bytes]:
    """Return the base64 digits for each alignment, without those that depend on neighboring bytes."""
    found = []
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + payload)
        begin = 0 if not before else 4
        found.append(encoded[begin : 4 * ((before + len(payload)) // 3)])
    return [form for form in found if len(form) >= 8]


def found_in(folder: Path, needles: Needles) -> dict[str, set[str]]:
    """Return the names of files that contain a needle, by kind of needle."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            relative = str(path.relative_to(folder))
            for part in (relative.encode(), *_parts(path)):
                look(part, needles, relative, found)
    return found


def look(payload: bytes, needles: Needles, where: str, found: dict[str, set[str]]) -> None:
    for kind, forms in needles.items():
        if any(form in payload for form in forms):
            found.setdefault(kind, set()).add(where)


def _parts(path: Path) -> Iterator[bytes]:
    """Return the file's bytes, and the unpacked contents of a backup."""
    payload = path.read_bytes()
    yield payload
    if zipfile.is_zipfile(io.BytesIO(payload)) and payload.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            for name in archive.namelist():
                yield archive.read(name)
                if name.endswith(".zst"):
                    with archive.open(name) as entry, ZstdFile(entry) as unpacked:
                        yield unpacked.read()
                    table = metadata.tables[name.partition(".")[0]]
                    with archive.open(name) as entry:
                        for row in read_rows(entry, table, read_manifest(path).rows[table.name]):
                            yield b"\0".join(value for value in row if isinstance(value, bytes))

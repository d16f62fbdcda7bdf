"""Looks for what should be nowhere, in every form that it may have, in every byte of a folder."""

from __future__ import annotations

import base64
import io
import json
import urllib.parse
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from models.runtime.network import Float

WINDOW_BYTES = 24
WINDOWS = 8
"""Of a photo, each of which would give it away."""
NUMBERS = 6
"""Of a vector."""
Needles = Mapping[str, list[bytes]]


def forms_of_text(text: str) -> list[bytes]:
    """As it is written, in JSON, in an address, in UTF-16, in base64."""
    plain = text.encode()
    written = {plain, json.dumps(text)[1:-1].encode(), text.encode("utf-16-le"), plain.hex().encode()}
    return [*written, urllib.parse.quote(text).encode(), *_in_base64(plain)]


def forms_of_bytes(payload: bytes) -> list[bytes]:
    """Some windows of it, that not every photo has."""
    last = len(payload) - WINDOW_BYTES
    places = np.linspace(min(700, last // 2), last, WINDOWS).astype(int)
    windows = [payload[place : place + WINDOW_BYTES] for place in places]
    return [
        form for window in windows if len(set(window)) > WINDOW_BYTES // 2 for form in (window, *_in_base64(window))
    ]


def forms_of_vector(vector: Float) -> list[bytes]:
    """Its first numbers as numbers of 16, 32 and 64 bits, and each of them in decimal digits."""
    first = np.asarray(vector[:NUMBERS], np.float32)
    binary = [first.astype(kind).tobytes() for kind in ("<f2", "<f4", "<f8", ">f4")]
    decimal = [f"{abs(number):.6f}"[1:].encode() for number in first[:3].tolist() if abs(number) > 0.01]
    return [*binary, *_in_base64(binary[1]), *decimal]


def _in_base64(payload: bytes) -> list[bytes]:
    """Wherever it begins in what was encoded: without the digits that depend on its neighbors."""
    found = []
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + payload)
        begin = 0 if not before else 4
        found.append(encoded[begin : 4 * ((before + len(payload)) // 3)])
    return [form for form in found if len(form) >= 8]


def found_in(folder: Path, needles: Needles) -> dict[str, set[str]]:
    """The names of files by kind of what is found in them."""
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


def open_files(process: int, folder: Path) -> Iterator[tuple[str, bytes]]:
    """What a process holds open in a folder, also under no name any more."""
    for handle in Path(f"/proc/{process}/fd").iterdir():
        try:
            name = str(handle.readlink())
            if name.startswith(str(folder)):
                yield name, handle.read_bytes()
        except OSError:  # closed meanwhile
            continue


def _parts(path: Path) -> Iterator[bytes]:
    """The file, and what a backup holds in it, unpacked."""
    payload = path.read_bytes()
    yield payload
    if zipfile.is_zipfile(io.BytesIO(payload)) and payload.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            for name in archive.namelist():
                entry = archive.read(name)
                yield entry
                if name.endswith(".arrow"):
                    with pa.ipc.open_stream(entry) as stream:
                        for batch in stream:
                            for column in batch.columns:
                                yield from (bytes(buffer) for buffer in column.buffers() if buffer is not None)

"""MXNet RecordIO (``train.rec`` with ``train.idx`` beside it), as InsightFace ships its face sets; read without mxnet.

A record is one part or more. A part is the magic, a word, the data, and zeros up to a multiple of four bytes; the
word's upper 3 bits say where the part stands in its record, its lower 29 how many bytes of data it has. The magic
inside the data, at a multiple of four, would look like another part: the writer cuts there and leaves it out, the
reader joins parts with it (dmlc-core, ``src/recordio.cc``). An image record begins with an ``IRHeader`` (flag, label,
id, id2), and flag > 0 says that as many float32 labels follow (``python/mxnet/recordio.py``). All little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from training.config import ConfigError

MAGIC: Final = 0xCED7230A
MAGIC_BYTES: Final = struct.pack("<I", MAGIC)
LENGTH_BITS: Final = 29
MAX_LENGTH: Final = (1 << LENGTH_BITS) - 1
PART: Final = struct.Struct("<II")
IR_HEADER: Final = struct.Struct("<IfQQ")
# The first bytes of an image record that is whole: the part, the IRHeader, and the first of the labels that may follow.
HEAD: Final = np.dtype(
    [(n, "<u4") for n in ("magic", "word", "flag")] + [("label", "<f4"), ("ids", "<u8", 2), ("first", "<f4")]
)
SCAN_ROWS: Final = 1 << 16


class Place(IntEnum):
    """Of a part in its record."""

    WHOLE = 0
    FIRST = 1
    MIDDLE = 2
    LAST = 3


class RecordFile:
    """A ``.rec`` and its ``.idx``. Mapped, not loaded: records are read when asked for, from any thread.

    ``keys`` and ``offsets`` (bytes) are (n,) int64, in the order of the index.

    Raises:
        ConfigError: a file is missing or empty, the index is no index, or it points outside the records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys, self.offsets = _read_index(path.with_suffix(".idx"))
        if not path.is_file() or path.stat().st_size == 0:
            raise ConfigError(f"{path} is missing or empty; copy it again")
        self._bytes = np.memmap(path, np.uint8, "r")
        outside = np.flatnonzero((self.offsets < 0) | (self.offsets >= len(self._bytes)))
        if len(outside):
            key, offset = self.keys[outside[0]], self.offsets[outside[0]]
            raise ConfigError(
                f"{path.with_suffix('.idx')} puts record {key} at byte {offset}, outside the {len(self._bytes)} bytes "
                f"of {path.name}: one of the two is truncated or of another set; copy both again"
            )

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, row: int) -> bytes:
        """Return the record in this row of the index.

        Raises:
            ConfigError: no record begins there, or the file ends before the record does.
        """
        offset, parts = int(self.offsets[row]), list[bytes]()
        while True:
            magic, word = PART.unpack(self._slice(row, offset, PART.size))
            place, length = word >> LENGTH_BITS, word & MAX_LENGTH
            if magic != MAGIC or place not in ((Place.MIDDLE, Place.LAST) if parts else (Place.WHOLE, Place.FIRST)):
                raise self._no_record(offset)
            parts.append(self._slice(row, offset + PART.size, length))
            if place in (Place.WHOLE, Place.LAST):
                return MAGIC_BYTES.join(parts)
            offset += PART.size + length + -length % 4

    def name(self, row: int) -> str:
        """What messages call a record."""
        return f"{self.path}, record {self.keys[row]}"

    def _slice(self, row: int, offset: int, length: int) -> bytes:
        if offset + length > len(self._bytes):
            begin = self.offsets[row]
            raise ConfigError(f"{self.path} ends within the record at byte {begin}: it is truncated; copy it again")
        return self._bytes[offset : offset + length].tobytes()

    def _no_record(self, offset: int) -> ConfigError:
        return ConfigError(f"{self.path} has no record at byte {offset}: damaged, or the .idx belongs to another file")

    def image_labels(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the rows whose records hold an image, (m,), and the first label of each record, (n,).

        Only the head of each record is touched: a million records take about a second.
        """
        labels, has_image = np.empty(len(self), np.float32), np.empty(len(self), bool)
        for start in range(0, len(self), SCAN_ROWS):
            rows = slice(start, start + SCAN_ROWS)
            positions = self.offsets[rows, None] + np.arange(HEAD.itemsize)
            heads = self._bytes[np.minimum(positions, len(self._bytes) - 1)].view(HEAD)[:, 0]
            alien = np.flatnonzero(heads["magic"] != MAGIC)
            if len(alien):
                raise self._no_record(int(self.offsets[start + alien[0]]))
            labels[rows] = np.where(heads["flag"] > 0, heads["first"], heads["label"])
            has_image[rows] = heads["word"] & MAX_LENGTH > IR_HEADER.size + 4 * heads["flag"].astype(np.int64)
            cut = np.flatnonzero(heads["word"] >> LENGTH_BITS) + start  # into parts, maybe within the head
            for i in cut.tolist():
                vector, image = unpack(self.read(i), self.name(i))
                labels[i], has_image[i] = vector[0], len(image) > 0
        return np.flatnonzero(has_image), labels


class FaceRecords:
    """The images of a record file: ``keys`` and ``labels``, (n,) int64, the labels as written.

    InsightFace's sets hold more than images: record 0 says where they end, and after them comes one record a person.
    Those carry no image and are left out.

    Raises:
        ConfigError: as :class:`RecordFile`; a label is no whole number from 0; images that record 0 counts are missing.
    """

    def __init__(self, path: Path) -> None:
        self.file = RecordFile(path)
        self._rows, labels = self.file.image_labels()
        self.keys = self.file.keys[self._rows]
        whole = np.isfinite(labels) & (labels >= 0) & (labels == np.floor(labels))
        wrong = np.flatnonzero(~whole[self._rows])
        if len(wrong):
            label = labels[self._rows[wrong[0]]]
            raise ConfigError(f"{self.name(wrong[0])} has the label {label}; labels are whole numbers from 0")
        self.labels = labels[self._rows].astype(np.int64)
        # In float32, as the header was written: Glint360K has more images than the 2^24 up to which that is exact.
        header = labels[np.setdiff1d(np.flatnonzero(self.file.keys == 0), self._rows)]
        if len(header) and header[0] != np.float32(len(self) + 1):
            raise ConfigError(f"{path} counts {header[0] - 1:.0f} images, its .idx lists {len(self)}; copy both again")

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, i: int) -> str:
        return self.file.name(int(self._rows[i]))

    def encoded(self, i: int) -> bytes:
        """The image as it was stored: a JPEG, in the published sets."""
        return unpack(self.file.read(int(self._rows[i])), self.name(i))[1]

    def stamp(self, rows: NDArray[np.int64]) -> str:
        stat = self.file.path.stat()
        return f"{stat.st_size} {stat.st_mtime_ns} {self.keys[rows].tobytes().hex()}"


def _read_index(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not path.is_file():
        raise ConfigError(f"{path} is missing: copy it beside the .rec, or make it with MXNet's tools/rec2idx.py")
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty; copy it again")
    try:
        table = np.loadtxt(path, np.int64, ndmin=2)
    except ValueError as error:
        raise ConfigError(f"{path} is no index of key and position: {error}") from error
    if table.shape[1] != 2:
        raise ConfigError(f"{path} is no index: {table.shape[1]} columns instead of key and position")
    return table[:, 0], table[:, 1]


def unpack(record: bytes, name: str = "the record") -> tuple[NDArray[np.float32], bytes]:
    """Split an image record into its labels, (1,) or more, and the encoded image (empty where it has none).

    Raises:
        ConfigError: the record is shorter than its own header says; the message calls it ``name``.
    """
    if len(record) < IR_HEADER.size:
        raise ConfigError(f"{name} has {len(record)} bytes and is no image record; pack the set again")
    flag, label, _, _ = IR_HEADER.unpack_from(record)
    end = IR_HEADER.size + 4 * flag
    if len(record) < end:
        raise ConfigError(f"{name} has {len(record)} bytes and cannot hold the {flag} labels that it announces")
    labels = np.frombuffer(record, "<f4", flag, IR_HEADER.size) if flag else np.array([label])
    return labels.astype(np.float32), record[end:]


def pack(labels: float | Sequence[float], image: bytes, key: int) -> bytes:
    """The inverse of :func:`unpack`: one number goes into the header, several follow it."""
    if isinstance(labels, Sequence):
        return IR_HEADER.pack(len(labels), 0.0, key, 0) + np.asarray(labels, "<f4").tobytes() + image
    return IR_HEADER.pack(0, labels, key, 0) + image


def write_records(path: Path, records: Iterable[tuple[int, bytes]]) -> None:
    """Write ``path`` (``.rec``) and the ``.idx`` beside it from keys and records.

    Raises:
        ValueError: a record is longer than the format can say (512 MiB).
    """
    with path.open("wb") as stream, path.with_suffix(".idx").open("w", encoding="ascii") as index:
        for key, record in records:
            if len(record) > MAX_LENGTH:
                raise ValueError(f"record {key} has {len(record)} bytes; the format ends at {MAX_LENGTH}")
            index.write(f"{key}\t{stream.tell()}\n")
            cuts = 4 * np.flatnonzero(np.frombuffer(record, "<u4", len(record) // 4) == MAGIC)
            begins, ends = [0, *(cuts + 4)], [*cuts, len(record)]
            for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                last = i == len(cuts)
                place = (Place.LAST if last else Place.MIDDLE) if i else (Place.WHOLE if last else Place.FIRST)
                stream.write(PART.pack(MAGIC, place << LENGTH_BITS | int(end - begin)) + record[begin:end])
            stream.write(bytes(-len(record) % 4))


def write_faces(path: Path, images: Sequence[bytes], labels: Sequence[int]) -> None:
    """Write encoded images in InsightFace's layout: record 0, the images by person, one record a person with the
    range of keys of its images."""
    order = np.argsort(labels, kind="stable")
    end = len(images) + 1
    _, starts = np.unique(np.asarray(labels)[order], return_index=True)
    ranges = np.stack([starts + 1, np.append(starts[1:] + 1, end)], 1).tolist()
    write_records(
        path,
        [
            (0, pack((end, end + len(ranges)), b"", 0)),
            *((key, pack(float(labels[i]), images[i], key)) for key, i in enumerate(order, 1)),
            *((key, pack(ends, b"", key)) for key, ends in enumerate(ranges, end)),
        ],
    )

"""MXNet RecordIO reader (``train.rec`` with ``train.idx`` beside it), InsightFace's format; needs no mxnet.

A record has one or more parts: magic, word, data, zero padding to four bytes. The word's upper 3 bits hold the position
of the part, its lower 29 bits the length of the data. The writer cuts a record wherever the aligned data equals the
magic, and the reader joins the parts with it (dmlc-core, ``src/recordio.cc``). An image record starts with an
``IRHeader`` (flag, label, id, id2); flag > 0 announces that many float32 labels after it
(``python/mxnet/recordio.py``). All little-endian.
"""

from __future__ import annotations

import struct
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
# Start of an unsplit image record: the part, the IRHeader, and the first additional label.
RECORD_HEAD: Final = np.dtype(
    [(n, "<u4") for n in ("magic", "word", "flag")] + [("label", "<f4"), ("ids", "<u8", 2), ("first", "<f4")]
)
SCAN_ROWS: Final = 1 << 16


class PartPosition(IntEnum):
    """Position of a part in its record."""

    WHOLE = 0
    FIRST = 1
    MIDDLE = 2
    LAST = 3


class RecordFile:
    """A ``.rec`` and its ``.idx``, memory-mapped. Reads are thread-safe.

    ``keys`` and ``offsets`` (bytes) are (n,) int64, in the order of the index. Raises ConfigError if a file is missing
    or empty, or the index is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys, self.offsets = _read_index(path.with_suffix(".idx"))
        if not path.is_file() or path.stat().st_size == 0:
            raise ConfigError(f"{path} is missing or empty. Copy it again")
        self._bytes = np.memmap(path, np.uint8, "r")

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, row: int) -> bytes:
        """Return the record in this row of the index. Raises ConfigError if no record starts there, or the file is
        truncated."""
        offset, parts = int(self.offsets[row]), list[bytes]()
        while True:
            magic, word = PART.unpack(self._slice(row, offset, PART.size))
            place, length = word >> LENGTH_BITS, word & MAX_LENGTH
            if magic != MAGIC or place not in (
                (PartPosition.MIDDLE, PartPosition.LAST) if parts else (PartPosition.WHOLE, PartPosition.FIRST)
            ):
                raise self._missing_record(offset)
            parts.append(self._slice(row, offset + PART.size, length))
            if place in (PartPosition.WHOLE, PartPosition.LAST):
                return MAGIC_BYTES.join(parts)
            offset += PART.size + length + -length % 4

    def name(self, row: int) -> str:
        """Return the name of a record for messages."""
        return f"{self.path}, record {self.keys[row]}"

    def _slice(self, row: int, offset: int, length: int) -> bytes:
        if offset + length > len(self._bytes):
            begin = self.offsets[row]
            raise ConfigError(f"{self.path} is truncated: it ends within the record at byte {begin}. Copy it again")
        return self._bytes[offset : offset + length].tobytes()

    def _missing_record(self, offset: int) -> ConfigError:
        return ConfigError(f"{self.path} has no record at byte {offset}: damaged, or the .idx belongs to another file")

    def image_labels(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the (m,) rows whose records hold an image, and the (n,) first label of each record. Reads only the
        start of each record: about one second per million records."""
        labels, has_image = np.empty(len(self), np.float32), np.empty(len(self), bool)
        for start in range(0, len(self), SCAN_ROWS):
            rows = slice(start, start + SCAN_ROWS)
            positions = self.offsets[rows, None] + np.arange(RECORD_HEAD.itemsize)
            heads = self._bytes[np.minimum(positions, len(self._bytes) - 1)].view(RECORD_HEAD)[:, 0]
            invalid = np.flatnonzero(heads["magic"] != MAGIC)
            if len(invalid):
                raise self._missing_record(int(self.offsets[start + invalid[0]]))
            labels[rows] = np.where(heads["flag"] > 0, heads["first"], heads["label"])
            has_image[rows] = heads["word"] & MAX_LENGTH > IR_HEADER.size + 4 * heads["flag"].astype(np.int64)
            cut = np.flatnonzero(heads["word"] >> LENGTH_BITS) + start  # split records, maybe within the start
            for i in cut.tolist():
                vector, image = unpack(self.read(i), self.name(i))
                labels[i], has_image[i] = vector[0], len(image) > 0
        return np.flatnonzero(has_image), labels


class FaceRecords:
    """Images of a record file: ``keys`` and ``labels``, (n,) int64, as in the file.

    InsightFace's sets also contain record 0, which counts the images, and one record per person after the images. Those
    carry no image and are skipped. Raises ConfigError as `RecordFile` does; or a label is not a non-negative integer,
    or images are missing.
    """

    def __init__(self, path: Path) -> None:
        self.file = RecordFile(path)
        self._rows, labels = self.file.image_labels()
        self.keys = self.file.keys[self._rows]
        whole = np.isfinite(labels) & (labels >= 0) & (labels == np.floor(labels))
        wrong = np.flatnonzero(~whole[self._rows])
        if len(wrong):
            label = labels[self._rows[wrong[0]]]
            raise ConfigError(f"{self.name(wrong[0])} has the label {label}. Labels must be non-negative integers")
        self.labels = labels[self._rows].astype(np.int64)
        # Compare in float32, as written: Glint360K exceeds 2^24 images, above which float32 is not exact.
        header = labels[np.setdiff1d(np.flatnonzero(self.file.keys == 0), self._rows)]
        if len(header) and header[0] != np.float32(len(self) + 1):
            raise ConfigError(f"{path} counts {header[0] - 1:.0f} images, its .idx lists {len(self)}. Copy both again")

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, i: int) -> str:
        return self.file.name(int(self._rows[i]))

    def read_encoded(self, i: int) -> bytes:
        """Return the stored image, a JPEG in the published sets."""
        return unpack(self.file.read(int(self._rows[i])), self.name(i))[1]

    def fingerprint(self, rows: NDArray[np.int64]) -> str:
        stat = self.file.path.stat()
        return f"{stat.st_size} {stat.st_mtime_ns} {self.keys[rows].tobytes().hex()}"


def _read_index(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not path.is_file():
        raise ConfigError(f"{path} is missing. Copy it beside the .rec, or create it with MXNet's tools/rec2idx.py")
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty. Copy it again")
    try:
        table = np.loadtxt(path, np.uint64, ndmin=2).astype(np.int64)
    except ValueError as error:
        raise ConfigError(f"{path} is not an index of key and position: {error}") from error
    if table.shape[1] != 2:
        raise ConfigError(f"{path} is not an index: it has {table.shape[1]} columns instead of 2")
    return table[:, 0], table[:, 1]


def unpack(record: bytes, name: str = "the record") -> tuple[NDArray[np.float32], bytes]:
    """Split an image record into (k,) labels and the encoded image, which may be empty. Raises ConfigError if the
    record is shorter than its header announces; the message contains ``name``."""
    if len(record) < IR_HEADER.size:
        raise ConfigError(f"{name} has {len(record)} bytes and is not an image record. Create the set again")
    flag, label, _, _ = IR_HEADER.unpack_from(record)
    end = IR_HEADER.size + 4 * flag
    if len(record) < end:
        raise ConfigError(f"{name} has {len(record)} bytes, too few for the {flag} labels that it announces")
    labels = np.frombuffer(record, "<f4", flag, IR_HEADER.size) if flag else np.array([label])
    return labels.astype(np.float32), record[end:]

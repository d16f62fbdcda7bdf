"""Writers of MXNet record files, shards and LFW-style .bin sets, for tests of the readers."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from training.data.recordio import IR_HEADER, LENGTH_BITS, MAGIC, PART, PartPosition


def pack(labels: float | Sequence[float], image: bytes, key: int) -> bytes:
    """The inverse of :func:`unpack`: one number goes into the header, several follow it."""
    if isinstance(labels, Sequence):
        return IR_HEADER.pack(len(labels), 0.0, key, 0) + np.asarray(labels, "<f4").tobytes() + image
    return IR_HEADER.pack(0, labels, key, 0) + image


def write_records(path: Path, records: Iterable[tuple[int, bytes]]) -> None:
    """Write ``path`` (``.rec``) and the ``.idx`` beside it from keys and records."""
    with path.open("wb") as stream, path.with_suffix(".idx").open("w", encoding="ascii") as index:
        for key, record in records:
            index.write(f"{key}\t{stream.tell()}\n")
            cuts = 4 * np.flatnonzero(np.frombuffer(record, "<u4", len(record) // 4) == MAGIC)
            begins, ends = [0, *(cuts + 4)], [*cuts, len(record)]
            for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                last = i == len(cuts)
                place = (
                    (PartPosition.LAST if last else PartPosition.MIDDLE)
                    if i
                    else (PartPosition.WHOLE if last else PartPosition.FIRST)
                )
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


def write_shard(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """Write a tar file of named contents, and return its folder."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", encoding="utf-8", errors="surrogateescape") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path.parent


def write_bin(path: Path, images: Sequence[bytes], same: Sequence[bool]) -> None:
    """Write encoded images, two a pair, in the published layout."""
    path.write_bytes(pickle.dumps(([bytes(i) for i in images], [bool(s) for s in same]), protocol=4))

"""Graphs on disk, which take minutes to build: the links alone, for the vectors are in SQL.

A file says which template each node was, and a keyed hash of its vector. Whoever reads it finds the nodes again among
what SQL holds now; one that is gone, or whose vector is another, stays as a dead node. A file that is damaged, of
another gallery or recogniser, or of too many dead nodes is deleted. So is one that holds somebody who is deleted, at
once; a later one leaves them out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.network import Float
from service.files import replacing
from service.gallery.faiss_index import Graph
from service.gallery.index import Keys
from service.gallery.segments import ROWS_PICKED, Rows, Segment
from service.gallery.subjects import Gallery

MAGIC: Final = b"kith graph 3\n"
SUFFIX: Final = ".graph"
LIVING_SHARE: Final = 0.8
"""Of a file's nodes, without which it is not worth reading."""
UNFINISHED: Final = ".part"
UNFINISHED_S: Final = 3600
"""Without a change, after which a file is nobody's."""


class UnusableFileError(Exception):
    """Why an index file cannot be used."""


@dataclass(frozen=True)
class FileProblem:
    path: Path
    problem: str


@dataclass(frozen=True, eq=False)
class StoredGraph:
    """(n,) keys, -1 of who was deleted, owners and hashes of the nodes, and the links between them."""

    keys: Keys
    owners: Keys
    hashes: NDArray[np.uint64]
    links: bytes


class IndexFiles:
    """The files of one gallery's index under one recogniser and rule of fusion, in ``folder``."""

    def __init__(self, folder: Path, gallery: Gallery) -> None:
        self._folder = _folder_of(folder, gallery.pk) / f"{gallery.generation}-{gallery.settings.fusion}"
        kept = {gallery.generation, gallery.current_generation, gallery.other.number if gallery.other else -1}
        self._kept, self._own = {str(number) for number in kept}, str(gallery.generation)
        self._identity = {
            "gallery": gallery.pk,
            "generation": gallery.generation,
            "fingerprint": gallery.fingerprint,
            "fusion": gallery.settings.fusion,
            "dimension": gallery.dimension,
        }
        # By a hash that everybody can make, whoever has somebody's vector could ask whether they are in.
        self._key = gallery.seal.pseudonym("index file", "key").encode()
        self._paths: dict[int, Path] = {}

    def has(self, segment: Segment) -> bool:
        return segment.number in self._paths

    def write(self, segment: Segment) -> None:
        """Raises OSError."""
        assert isinstance(segment.structure, Graph)  # noqa: S101 - the caller saw to it
        keys = np.where(segment.alive, segment.keys, -1)
        hashes = np.where(segment.alive, _hashes(segment.vectors, self._key), 0).astype(np.uint64)
        parts = [keys.tobytes(), segment.owners.tobytes(), hashes.tobytes(), segment.structure.links()]
        checksum = _checksum(parts)
        header = {**self._identity, "nodes": len(keys), "checksum": checksum}
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"{checksum[:16]}{SUFFIX}"
        with replacing(path) as file:
            for part in (MAGIC, json.dumps(header).encode() + b"\n", *parts):
                file.write(part)
        self._paths[segment.number] = path

    def remove(self, number: int) -> None:
        """The file of a segment, if there is one."""
        path = self._paths.pop(number, None)
        if path is not None:
            path.unlink(missing_ok=True)
            _sync(path.parent)

    def keep(self, segments: Iterable[Segment]) -> None:
        """Remove the files of all others."""
        numbers = {segment.number for segment in segments}
        for number in [number for number in self._paths if number not in numbers]:
            self.remove(number)

    def read(
        self, rows: Rows, next_number: Callable[[], int], report: Callable[[str], None]
    ) -> tuple[list[Segment], Rows]:
        """Segments of those of these rows that are in a usable file, and the other rows. What is unusable is reported
        and deleted."""
        self._paths.clear()
        self._forget_others()
        segments, free = [], np.ones(len(rows.keys), np.bool_)
        order = np.argsort(rows.keys)
        for path in sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: -path.stat().st_size):
            try:
                stored = _read(path, self._identity)
                found = _found(stored, rows, order, free, self._key)
                if (found >= 0).sum() < LIVING_SHARE * len(found):
                    raise UnusableFileError("it is of another time: too many of its vectors went or changed since")
                segment = _segment(next_number(), stored, rows, found)
            except (OSError, UnusableFileError) as error:
                report(f"index file {path.name} was deleted and is made anew: {error}")
                path.unlink(missing_ok=True)
                continue
            free[found[found >= 0]] = False
            segments.append(segment)
            if np.isin(stored.keys[stored.keys >= 0], rows.keys).all():
                self._paths[segment.number] = path
            else:  # somebody in it was deleted meanwhile: another is written, without them
                path.unlink(missing_ok=True)
        return segments, rows if not segments else rows.at(np.flatnonzero(free))

    def _forget_others(self) -> None:
        """Files by a rule of fusion or a recogniser that the gallery has no more, and those that a process which was
        killed left unfinished."""
        for other in self._folder.parent.glob("*-*"):
            generation, _, _ = other.name.partition("-")
            if generation not in self._kept or (generation == self._own and other != self._folder):
                shutil.rmtree(other, ignore_errors=True)
        for path in _unfinished(self._folder.parent.parent, f"{self._folder.parent.name}/{self._folder.name}"):
            path.unlink(missing_ok=True)


def forget_files(folder: Path, gallery: Gallery) -> None:
    """Remove all files of a deleted gallery."""
    shutil.rmtree(_folder_of(folder, gallery.pk), ignore_errors=True)


def forget_earlier(folder: Path) -> None:
    """Remove files of earlier versions, whose hashes tell more than they should, also of galleries that nobody searches
    any more."""
    for path in folder.glob(f"*/*/*{SUFFIX}"):
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                earlier = file.read(len(MAGIC)) != MAGIC
            if earlier:
                path.unlink()


def check_index_files(folder: Path, galleries: Iterable[int]) -> list[FileProblem]:
    """What is wrong with the files in ``folder``, given the keys of the galleries that there are: damaged ones, and
    those of galleries that were deleted. Deleting such a file mends it."""
    known, problems = {str(_folder_of(folder, pk)) for pk in galleries}, []
    for path in sorted(folder.glob(f"*/*/*{SUFFIX}")):
        if str(path.parent.parent) not in known:
            problems.append(FileProblem(path, "its gallery was deleted"))
            continue
        try:
            _read(path, {})
        except (OSError, UnusableFileError) as error:
            problems.append(FileProblem(path, str(error)))
    return problems + [FileProblem(path, "it was never finished") for path in _unfinished(folder, "*/*")]


def _unfinished(folder: Path, below: str) -> list[Path]:
    """Files that nobody is writing any more."""
    now = time.time()
    found = sorted(folder.glob(f"{below}/*{UNFINISHED}"))
    return [path for path in found if abs(now - path.stat().st_mtime) > UNFINISHED_S]


def _folder_of(folder: Path, gallery_pk: int) -> Path:
    return folder / str(gallery_pk)


def _read(path: Path, identity: dict[str, Any]) -> StoredGraph:
    """Raises UnusableFileError, OSError."""
    content = memoryview(path.read_bytes())
    head = bytes(content[:4096])
    end = head.find(b"\n", len(MAGIC))
    try:
        if not head.startswith(MAGIC) or end < 0:
            raise ValueError
        header = json.loads(head[len(MAGIC) : end])
        n, checksum = int(header["nodes"]), str(header["checksum"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableFileError("it is no file of this version, or damaged") from error
    body = content[end + 1 :]
    if len(body) < 24 * n or _checksum([body]) != checksum:
        raise UnusableFileError("it is damaged: its checksum is another")
    if other := [name for name, value in identity.items() if header.get(name) != value]:
        raise UnusableFileError(f"it is of another {' and '.join(other)}")
    keys, owners = np.frombuffer(body[: 16 * n], np.int64).reshape(2, n)
    return StoredGraph(keys, owners, np.frombuffer(body[16 * n : 24 * n], np.uint64), bytes(body[24 * n :]))


def _found(stored: StoredGraph, rows: Rows, order: Keys, free: NDArray[np.bool_], key: bytes) -> Keys:
    """(n,) the row of each node; -1 where there is none, or it is another's, or its vector is another."""
    if not len(order):
        return np.full(len(stored.keys), -1, np.int64)
    ordered = rows.keys[order]
    places = np.minimum(np.searchsorted(ordered, stored.keys), len(ordered) - 1)
    found = np.where(ordered[places] == stored.keys, order[places], -1)
    same = (found >= 0) & free[found] & (rows.owners[found] == stored.owners)
    same[same] = _hashes(rows.vectors, key, found[same]) == stored.hashes[same]
    return np.where(same, found, -1)


def _segment(number: int, stored: StoredGraph, rows: Rows, found: Keys) -> Segment:
    vectors = np.zeros((len(found), rows.vectors.shape[1]), np.float32)
    living = np.flatnonzero(found >= 0)
    for part in _slices(living):
        vectors[part] = rows.vectors[found[part]]
    structure = Graph.of_links(stored.links, vectors)
    if len(structure.vectors) != len(found):
        raise UnusableFileError("it has not as many links as nodes")
    segment = Segment.seal(number, Rows(stored.keys, stored.owners, vectors), structure)
    return segment.without(np.flatnonzero(found < 0))


def _hashes(vectors: Float, key: bytes, rows: Keys | None = None) -> NDArray[np.uint64]:
    """(n,) of (n, d) vectors, or of some: 64 bits of keyed BLAKE2b (RFC 7693) each."""
    chosen = np.arange(len(vectors)) if rows is None else rows
    digests = bytearray()
    for part in _slices(chosen):
        for vector in np.ascontiguousarray(vectors[part]):
            digests += hashlib.blake2b(vector.data, digest_size=8, key=key).digest()
    return np.frombuffer(bytes(digests), np.uint64)


def _slices(rows: Keys) -> Iterator[Keys]:
    for start in range(0, len(rows), ROWS_PICKED):
        yield rows[start : start + ROWS_PICKED]


def _checksum(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

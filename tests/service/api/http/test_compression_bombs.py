"""A few bytes cannot cause much work: compression bombs and files of too many entries are rejected at once."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from kith import Kith
from kith.wire.transfer import GalleryFileHeader
from service.core.json_limits import MAX_VALUES
from service.core.unpacking import (
    MAX_SMALL_MEMBERS,
    PIECE_BYTES,
    RATIO_EXEMPT_BYTES,
    Unpacker,
    ZstdFile,
    unpacked_pieces,
)
from service.domain.gallery_items import SIZE_EXEMPT_ITEMS, max_items
from service.inference.archives import ArchiveLimits, iterate_members, read_contents
from service.storage.transfer import ndjson
from tests.refusals import check, raises_code
from tests.service.usecases.test_bulk_enrollment import as_zip

LIMITS = ArchiveLimits(100_000, 20_000_000, 100_000_000_000)
EMPTY_MEMBER = gzip.compress(b"", mtime=0)
EMPTY_FRAME = b"\x28\xb5\x2f\xfd\0\x58\x01\0\0"
NDJSON = {"Content-Type": "application/x-ndjson", "Content-Encoding": "gzip"}


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes more processor time."""
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


def look(path: Path, limits: ArchiveLimits = LIMITS) -> Any:
    return read_contents(path, limits, None, lambda: None)


def zstd(payload: bytes) -> bytes:
    buffer = io.BytesIO()
    with ZstdFile(buffer, "w") as packed:
        packed.write(payload)
    return buffer.getvalue()


def tar_header(kind: bytes, size: int, records: bytes = b"", name: str = "x") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512)


def tar_of_zeros() -> bytes:
    return tar_header(tarfile.REGTYPE, 3 * RATIO_EXEMPT_BYTES) + bytes(3 * RATIO_EXEMPT_BYTES)


def sparse_of_pax() -> bytes:
    info = tarfile.TarInfo("x")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a/1.jpg"}
    info.size = 512
    return info.tobuf(tarfile.PAX_FORMAT) + b"9999999\n" + bytes(10_240)


def zip_of_entries(name: bytes) -> bytes:
    """A directory of 1.2 million entries that a zip's end does not count."""
    entry = b"PK\1\2" + struct.pack("<4B4HL2L5H2L", 20, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0) + name
    directory = entry * 1_200_000
    assert len(entry) == 48
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(directory), 4, 0)
    return b"PK\3\4" + directory + end


def overlapping_zip() -> bytes:
    """Entries that share their bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("ada/1.jpg", bytes(20_000_000))
        info = opened.infolist()[0]
        for n in range(2, 20):
            again = zipfile.ZipInfo(f"ada/{n}.jpg")
            again.header_offset, again.compress_type = info.header_offset, info.compress_type
            again.compress_size, again.file_size, again.CRC = info.compress_size, info.file_size, info.CRC
            opened.filelist.append(again)
        opened._didModify = True  # type: ignore[attr-defined]
    return buffer.getvalue()


def manifest(content: bytes) -> bytes:
    return as_zip({"manifest.csv": content})


BIG, END = 1 << 30, bytes(10_240)
BOMBS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "empty gzip members": (lambda: EMPTY_MEMBER * 500_000, "archive_invalid", "members"),
    "empty zstd frames": (lambda: EMPTY_FRAME * 500_000, "archive_invalid", "almost empty members"),
    "skippable zstd frames": (
        lambda: EMPTY_FRAME + (b"\x50\x2a\x4d\x18" + bytes(4)) * 500_000,
        "archive_invalid",
        "almost empty members",
    ),
    "zeros in gzip": (lambda: gzip.compress(tar_of_zeros(), 1), "archive_invalid", "times its size"),
    "zeros in zstd": (lambda: zstd(tar_of_zeros()), "archive_too_large", "when unpacked"),
    "many entries of a zip": (lambda: zip_of_entries(b"ab"), "archive_too_large", "100000 files"),
    "many folders of a zip": (lambda: zip_of_entries(b"a/"), "archive_too_large", "100000 files"),
    "entries that share bytes": (overlapping_zip, "archive_too_large", "unpacked"),
    "lines of a manifest": (
        lambda: manifest(b"file,subject\n" + b"\n" * 10_000_000),
        "archive_too_large",
        "more than",
    ),
    "columns of a manifest": (lambda: manifest(b"," * 10_000_000), "archive_too_large", "more than"),
    "columns and rows of a manifest": (
        lambda: manifest(b"file,subject" + b",c" * 1_000_000 + b"\n" + b"1.jpg,ada\n" * 10_000 + b"2.jpg"),
        "archive_invalid",
        "are required",
    ),
    "an extended header": (lambda: tar_header(tarfile.XHDTYPE, BIG) + END, "archive_too_large", "header"),
    "a global header": (lambda: tar_header(tarfile.XGLTYPE, 1001) + END, "archive_too_large", "header"),
    "a long name": (lambda: tar_header(tarfile.GNUTYPE_LONGNAME, BIG) + END, "archive_too_large", "header"),
    "a long link": (lambda: tar_header(tarfile.GNUTYPE_LONGLINK, BIG) + END, "archive_too_large", "header"),
    "a sparse file": (lambda: tar_header(tarfile.GNUTYPE_SPARSE, 512) + END, "archive_invalid", "sparse"),
    "a sparse file of pax": (sparse_of_pax, "archive_invalid", "sparse"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_are_refused_at_once(tmp_path: Path, case: str) -> None:
    made, code, said = BOMBS[case]
    archive = tmp_path / "archive"
    archive.write_bytes(made())
    with within(1), raises_code(code, match=said):
        look(archive)
        list(iterate_members(archive, LIMITS))


def test_global_headers_of_a_tar_do_not_add_up(tmp_path: Path) -> None:
    """All of them were applied to every further entry: 760 KB took 17 s, and twice as much four times as long."""
    empty = tar_header(tarfile.REGTYPE, 0, name="a/b.txt")
    further = tar_header(tarfile.XHDTYPE, 12, b"12 extra=ab\n") + empty
    pairs = (
        tar_header(tarfile.XGLTYPE, 80 * 12, b"".join(b"12 %05d=ab\n" % n for n in range(at, at + 80)))
        + empty
        + further
        for at in range(0, 80_000, 80)
    )
    archive = tmp_path / "archive"
    archive.write_bytes(gzip.compress(b"".join(pairs) + END))
    with within(2):
        assert len(look(archive).ignored) == 2000


def test_folders_and_links_of_a_tar_count_as_entries(tmp_path: Path) -> None:
    archive = tmp_path / "folders.tar"
    kinds = (tarfile.DIRTYPE, tarfile.SYMTYPE)
    archive.write_bytes(b"".join(tar_header(kinds[n % 2], 0) for n in range(30)) + END)
    assert look(archive).subjects == {}
    with raises_code("archive_too_large", match="29 files"):
        look(archive, ArchiveLimits(29, 1000, 1_000_000))


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_output_of_common_tools_is_decompressed(piece: int) -> None:
    """Concatenated members and frames, bgzip blocks with an empty one at the end, and padding."""
    parts = [bytes([n % 251]) * 64_000 for n in range(2 * MAX_SMALL_MEMBERS)]
    packed = b"".join(gzip.compress(part) for part in parts) + EMPTY_MEMBER + b"\0" * 1000
    gunzip = Unpacker("gzip")
    found = b"".join(each for at in range(0, len(packed), piece) for each in gunzip.feed(packed[at : at + piece]))
    gunzip.end()
    assert found == b"".join(parts)
    pieces = list(unpacked_pieces(io.BytesIO(b"".join(map(zstd, parts))), "zstd"))
    assert b"".join(pieces) == b"".join(parts)
    assert max(map(len, pieces)) <= PIECE_BYTES


@pytest.mark.parametrize("line", [b"\n", b"{}\n"])
def test_a_small_import_of_many_lines_is_refused(server: str, gallery: str, kith: Kith, line: bytes) -> None:
    model = kith.model()
    head = {"kith": "gallery", "version": 1, "recognizer": model.recognizer, "dimension": model.dimension}
    packed = gzip.compress(json.dumps(head).encode() + b"\n" + line * (40_000_000 // len(line)), 6)
    assert len(packed) < 130_000
    for content, said in ((packed, "lines for its size"), (EMPTY_MEMBER * 500_000, "members")):
        with within(10):
            response = httpx.post(f"{server}/v1/galleries/{gallery}/import", content=content, headers=NDJSON)
        assert said in check(response, 422, "import_invalid")["detail"]
    assert [max_items(size) for size in (0, 4_000_000)] == [SIZE_EXEMPT_ITEMS, SIZE_EXEMPT_ITEMS + 1_000_000]


def test_lines_of_many_values_are_rejected_alone_and_do_not_accumulate() -> None:
    def dense(values: int) -> bytes:
        return b'{"subject": "ada", "metadata": {"k": [' + b"[]," * values + b"[]]}}\n"

    lines = ndjson.Lines(GalleryFileHeader("a" * 32, 4))
    list(lines.feed(dense(MAX_VALUES + 1) + b'{"subject": "bob"}\n'))
    (block,) = lines.end()
    dense_error, other = (row.error for row in block)
    assert dense_error is not None and "more than" in dense_error.detail and other is None
    blocks = list(ndjson.Lines(GalleryFileHeader("a" * 32, 4)).feed(dense(6000) * 400))
    assert max(map(len, blocks)) < 100
    with within(0.5), raises_code("import_invalid", match="no header line"):
        list(ndjson.Lines().feed(b'{"kith":[' + b"[]," * 2_000_000 + b"[]]}\n"))

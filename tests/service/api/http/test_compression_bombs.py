"""A few bytes cannot cause much work: compression bombs and files of too many entries are rejected at once."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from kith import Kith
from kith.wire.transfer import GalleryFileHeader
from service.core.errors import ArchiveInvalidError
from service.core.json_limits import MAX_VALUES
from service.core.unpacking import (
    MAX_SMALL_MEMBERS,
    PIECE_BYTES,
    RATIO_EXEMPT_BYTES,
    PiecesFile,
    Unpacker,
    ZstdFile,
    unpacked_pieces,
)
from service.domain.gallery_items import SIZE_EXEMPT_ITEMS, max_items
from service.inference.archives import ArchiveLimits, iterate_members, read_contents
from service.storage.transfer import ndjson
from tests.refusals import check, raises_code

LIMITS = ArchiveLimits(1_000_000, 20_000_000, 100_000_000_000)
EMPTY_MEMBER = gzip.compress(b"", mtime=0)
EMPTY_FRAME = b"\x28\xb5\x2f\xfd\0\x58\x01\0\0"
NDJSON = {"Content-Type": "application/x-ndjson"}


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes more processor time."""
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


def look(path: Path, limits: ArchiveLimits = LIMITS) -> Any:
    return read_contents(path, limits, None, lambda: None)


def test_empty_gzip_members_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "members.tar.gz"
    archive.write_bytes(EMPTY_MEMBER * 500_000)
    with within(0.5), pytest.raises(ArchiveInvalidError, match="members"):
        look(archive)


def test_a_gzip_bomb_is_rejected(tmp_path: Path) -> None:
    archive = tmp_path / "zeros.tar.gz"
    with gzip.open(archive, "wb") as file:
        for _ in range(3 * RATIO_EXEMPT_BYTES // 1_000_000):
            file.write(bytes(1_000_000))
    with pytest.raises(ValueError, match="times its size"), archive.open("rb") as packed:
        unpacked, size = PiecesFile(unpacked_pieces(packed, "gzip")), 0
        while block := unpacked.read(10_000):
            size += len(block)
            assert size < 1.5 * RATIO_EXEMPT_BYTES


@pytest.mark.parametrize("frame", [EMPTY_FRAME, b"\x50\x2a\x4d\x18" + bytes(4)], ids=["empty", "skippable"])
def test_empty_zstd_frames_are_refused(tmp_path: Path, frame: bytes) -> None:
    archive = tmp_path / "frames.tar.zst"
    archive.write_bytes(EMPTY_FRAME + frame * 500_000)
    with within(0.5), pytest.raises(ArchiveInvalidError, match="almost empty frames"):
        look(archive)


def test_a_zstd_bomb_is_rejected(tmp_path: Path) -> None:
    archive = tmp_path / "zeros.tar.zst"
    with ZstdFile(archive, "w") as packed, tarfile.open(fileobj=packed, mode="w|") as opened:
        info = tarfile.TarInfo("zeros")
        info.size = 3 * RATIO_EXEMPT_BYTES
        opened.addfile(info, io.BytesIO(bytes(info.size)))
    with raises_code("archive_too_large", match="when unpacked"):
        look(archive)


def test_concatenated_zstd_frames_are_unpacked(tmp_path: Path) -> None:
    parts = [bytes([n % 251]) * 64_000 for n in range(2 * MAX_SMALL_MEMBERS)]
    file = tmp_path / "frames.zst"
    for part in parts:
        with ZstdFile(file, "a") as frame:
            frame.write(part)
    with file.open("rb") as packed:
        pieces = list(unpacked_pieces(packed, "zstd"))
    assert b"".join(pieces) == b"".join(parts)
    assert max(map(len, pieces)) <= PIECE_BYTES


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_output_of_common_tools_is_decompressed(piece: int) -> None:
    """Concatenated members, bgzip blocks with an empty one at the end, and padding."""
    parts = [bytes([n % 251]) * 64_000 for n in range(2 * MAX_SMALL_MEMBERS)]
    packed = b"".join(gzip.compress(part) for part in parts) + EMPTY_MEMBER + b"\0" * 1000
    gunzip = Unpacker("gzip")
    found = b"".join(each for at in range(0, len(packed), piece) for each in gunzip.feed(packed[at : at + piece]))
    gunzip.end()
    assert found == b"".join(parts)


@pytest.mark.parametrize("folders", [False, True])
def test_a_zip_of_too_many_entries_is_rejected_before_they_are_read(tmp_path: Path, folders: bool) -> None:
    count, name = 1_200_000, b"a/" if folders else b"ab"
    entry = b"PK\1\2" + struct.pack("<4B4HL2L5H2L", 20, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0) + name
    directory = entry * count
    assert len(entry) == 48
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(directory), 4, 0)
    archive = tmp_path / "many.zip"
    archive.write_bytes(b"PK\3\4" + directory + end)
    with within(1), raises_code("archive_too_large", match="1000000 files"):
        look(archive)


def test_folders_and_links_of_a_tar_count_as_entries(tmp_path: Path) -> None:
    archive = tmp_path / "folders.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        for n in range(30):
            info = tarfile.TarInfo(f"{n}")
            info.type = tarfile.DIRTYPE if n % 2 else tarfile.SYMTYPE
            opened.addfile(info)
    assert look(archive).subjects == {}
    with raises_code("archive_too_large", match="29 files"):
        look(archive, ArchiveLimits(29, 1000, 1_000_000))


def test_a_zip_whose_entries_share_bytes_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "overlapping.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("ada/1.jpg", bytes(20_000_000))
        info = opened.infolist()[0]
        for n in range(2, 20):
            again = zipfile.ZipInfo(f"ada/{n}.jpg")
            again.header_offset, again.compress_type = info.header_offset, info.compress_type
            again.compress_size, again.file_size, again.CRC = info.compress_size, info.file_size, info.CRC
            opened.filelist.append(again)
        opened._didModify = True  # type: ignore[attr-defined]
    with raises_code("archive_too_large", match="unpacked"):
        list(iterate_members(archive, LIMITS))


@pytest.mark.parametrize(
    "payload", [b"file,subject\n" + b"\n" * 10_000_000, b"," * 10_000_000], ids=["lines", "columns"]
)
def test_dense_manifests_are_refused(tmp_path: Path, payload: bytes) -> None:
    archive = tmp_path / "dense.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("manifest.csv", payload)
    with within(1), raises_code("archive_too_large", "archive_invalid", match="more than"):
        look(archive, ArchiveLimits(100_000, 20_000_000, 100_000_000_000))


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b" \n"])
def test_a_small_import_of_many_lines_is_refused(server: str, gallery: str, kith: Kith, line: bytes) -> None:
    model = kith.model()
    head = {"kith": "gallery", "version": 1, "recognizer": model.recognizer, "dimension": model.dimension}
    packed = gzip.compress(json.dumps(head).encode() + b"\n" + line * (40_000_000 // len(line)), 6)
    assert len(packed) < 130_000
    with within(10):
        response = httpx.post(
            f"{server}/v1/galleries/{gallery}/import", content=packed, headers=NDJSON | {"Content-Encoding": "gzip"}
        )
    assert "lines for its size" in check(response, 422, "import_invalid")["detail"]


def test_an_import_of_empty_members_is_refused(server: str, gallery: str) -> None:
    with within(5):
        response = httpx.post(
            f"{server}/v1/galleries/{gallery}/import",
            content=EMPTY_MEMBER * 500_000,
            headers=NDJSON | {"Content-Encoding": "gzip"},
        )
    assert "members" in check(response, 422, "import_invalid")["detail"]


def test_the_line_limit_of_an_import_follows_its_compressed_size() -> None:
    assert max_items(0) == SIZE_EXEMPT_ITEMS
    assert max_items(4_000_000) == SIZE_EXEMPT_ITEMS + 1_000_000


def test_dense_lines_of_an_import_are_rejected_separately() -> None:
    lines = ndjson.Lines(GalleryFileHeader("a" * 32, 4))
    dense = b'{"subject": "ada", "metadata": {"k": [' + b"[]," * (MAX_VALUES + 1) + b"[]]}}\n"
    list(lines.feed(dense + b'{"subject": "bob"}\n'))
    (block,) = lines.end()
    dense_error, other = (row.error for row in block)
    assert dense_error is not None and "more than" in dense_error.detail and other is None


def test_lines_of_many_values_do_not_accumulate() -> None:
    lines = ndjson.Lines(GalleryFileHeader("a" * 32, 4))
    dense = b'{"subject": "ada", "metadata": {"k": [' + b"[]," * 6000 + b"[]]}}\n"
    blocks = list(lines.feed(dense * 400))
    assert max(map(len, blocks)) < 100


def packed(tmp_path: Path, raw: bytes) -> Path:
    archive = tmp_path / "made.tar.gz"
    archive.write_bytes(gzip.compress(raw))
    return archive


def test_a_manifest_of_many_columns_is_refused_before_its_rows_are_read(tmp_path: Path) -> None:
    """Each row, however short, was given every column of the header: 10 KB took gigabytes."""
    archive = tmp_path / "columns.zip"
    header = ",".join(["file", "subject", *(f"c{n}" for n in range(1000))])
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("manifest.csv", header + "\n" + "a.jpg,ada\n" * 10_000)
    assert archive.stat().st_size < 10_000
    with within(0.3), pytest.raises(ArchiveInvalidError, match="columns"):
        look(archive)


def test_a_manifest_may_have_other_columns(tmp_path: Path) -> None:
    archive = tmp_path / "manifest.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("manifest.csv", "subject,note,file\nada,x,a.jpg\n")
        file.writestr("a.jpg", b"")
    assert look(archive).subjects == {"a.jpg": "ada"}


def pax_header(kind: bytes, records: bytes) -> bytes:
    info = tarfile.TarInfo("header")
    info.size, info.type = len(records), kind
    return info.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512)


def test_a_large_global_header_of_a_tar_is_refused(tmp_path: Path) -> None:
    records = b"".join(b"12 %05d=ab\n" % n for n in range(5000))
    with raises_code("archive_too_large", match="header"):
        look(packed(tmp_path, pax_header(tarfile.XGLTYPE, records) + bytes(1024)))


def test_global_headers_of_a_tar_do_not_add_up(tmp_path: Path) -> None:
    """All of them were applied to every further entry: 760 KB took 17 s, and twice as much four times as long."""
    empty = tarfile.TarInfo("a/b.txt").tobuf(tarfile.USTAR_FORMAT)
    further = pax_header(tarfile.XHDTYPE, b"12 extra=ab\n") + empty
    pairs = (
        pax_header(tarfile.XGLTYPE, b"".join(b"12 %05d=ab\n" % n for n in range(at, at + 80))) + empty + further
        for at in range(0, 80_000, 80)
    )
    with within(2):
        assert len(look(packed(tmp_path, b"".join(pairs) + bytes(1024))).ignored) == 2000


def test_the_header_of_lines_has_few_values() -> None:
    with within(0.5), raises_code("import_invalid", match="no header line"):
        list(ndjson.Lines().feed(b'{"kith":[' + b"[]," * 2_000_000 + b"[]]}\n"))

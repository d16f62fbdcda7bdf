"""Encrypted files: random access, and rejection of truncated, altered or exchanged files."""

from __future__ import annotations

import io
import random
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.errors import ArchiveInvalidError
from service.inference.archives import ArchiveLimits, iterate_members
from service.security.sealed_files import CHUNK_BYTES, HEADER_BYTES, SEALED_CHUNK_BYTES, SealedFile
from service.security.sealing import Seal, SealBrokenError, new_key

SEAL = Seal(new_key())
SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 17]
LIMITS = ArchiveLimits(1000, 10_000_000, 100_000_000)


def sealed(path: Path, payload: bytes, *, seal: Seal = SEAL, purpose: str = "archive a") -> SealedFile:
    file = SealedFile(path, seal, purpose)
    with file.writing() as writer:
        writer.write(payload)
        writer.finish()
    return file


def payload_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 2 * CHUNK_BYTES), max_size=6),
    st.lists(st.tuples(st.floats(0, 1.1), st.integers(0, 2 * CHUNK_BYTES)), max_size=8),
)
def test_random_writes_and_reads(writes: list[int], reads: list[tuple[float, int]]) -> None:
    whole = io.BytesIO(b"".join(map(payload_of, writes)))
    with tempfile.TemporaryDirectory() as folder:
        file = SealedFile(Path(folder) / "f", SEAL, "archive a")
        with file.writing() as writer:
            for size in writes:
                writer.write(payload_of(size))
            writer.finish()
        with file.open("rb") as reader:
            for share, size in reads:
                place = int(share * len(whole.getvalue()))
                assert reader.seek(place) == whole.seek(place) == reader.tell()
                assert reader.read(size) == whole.read(size)
            assert reader.seek(0, io.SEEK_END) == len(whole.getvalue())


@pytest.mark.parametrize("size", SIZES)
def test_whole_files_are_read_and_truncated_ones_refused(size: int, tmp_path: Path) -> None:
    file = sealed(tmp_path / "f", payload_of(size))
    whole = file.path.read_bytes()
    between = range(HEADER_BYTES, len(whole), SEALED_CHUNK_BYTES)
    assert len(whole) == HEADER_BYTES + size + 16 * max(1, -(-size // CHUNK_BYTES))
    with file.open("rb") as opened:
        assert opened.read() == payload_of(size)
    for kept in {0, 5, HEADER_BYTES - 1, len(whole) - 1, len(whole) - 20, *between}:
        file.path.write_bytes(whole[:kept])
        with pytest.raises(SealBrokenError), file.open("rb") as opened:
            opened.read()
    with file.writing() as writer:
        writer.write(payload_of(size))  # and not finished
    with pytest.raises(SealBrokenError):
        file.open("rb")


def test_other_files_are_refused_and_none_contains_plaintext(tmp_path: Path) -> None:
    file = sealed(tmp_path / "f", b"Ada Lovelace " * (3 * CHUNK_BYTES // 13))
    whole = file.path.read_bytes()
    assert b"Ada" not in whole
    assert whole != sealed(tmp_path / "g", b"Ada Lovelace " * (3 * CHUNK_BYTES // 13)).path.read_bytes()
    for other in (SealedFile(file.path, Seal(new_key()), "archive a"), SealedFile(file.path, SEAL, "archive b")):
        with pytest.raises(SealBrokenError):
            other.open("rb")
    whole = sealed(tmp_path / "f", payload_of(3 * CHUNK_BYTES)).path.read_bytes()
    header, one, two, three = (
        whole[:HEADER_BYTES],
        *(whole[HEADER_BYTES + i * SEALED_CHUNK_BYTES :][:SEALED_CHUNK_BYTES] for i in range(3)),
    )
    altered = (b"K" + whole[1:], whole[:-1] + bytes([whole[-1] ^ 1]))
    moved = (header + two + one + three, header + one + three, whole + three, whole + b"x", header + three)
    for forged in (*altered, *moved):
        file.path.write_bytes(forged)
        with pytest.raises(SealBrokenError), file.open("rb") as opened:
            opened.read()


def test_archives_are_read_from_encrypted_files(tmp_path: Path) -> None:
    photos = {f"person/{i}.jpg": payload_of(40_000 + i) for i in range(10)}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, photo in photos.items():
            archive.writestr(name, photo)
    file = sealed(tmp_path / "f", packed.getvalue())
    assert {member.path: member.read() for member in iterate_members(file, LIMITS)} == photos
    file.path.write_bytes(file.path.read_bytes()[:-1])
    with pytest.raises(ArchiveInvalidError, match="cannot be decrypted"):
        list(iterate_members(file, LIMITS))

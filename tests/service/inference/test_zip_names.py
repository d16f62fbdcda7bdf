"""Names in zip archives mean what their writers wrote, or nothing is guessed."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from kith.wire.identifiers import normalize_id
from service.inference.archives import ArchiveLimits, iterate_members, read_contents
from service.inference.zip_names import name_of

LIMITS = ArchiveLimits(1000, 100_000, 1_000_000)
JOSE = "José".encode()
UTF8_FLAG = 0x800


def zip_of(*entries: tuple[bytes, bool, bytes]) -> bytes:
    """Return a zip of files, each with the bytes of its name, the flag for UTF-8, and an extra field."""
    buffer = io.BytesIO()
    stand_ins = {f"{number:x}".rjust(len(name), "~"): (name, flag) for number, (name, flag, _) in enumerate(entries)}
    with zipfile.ZipFile(buffer, "w") as archive:
        for stand_in, (_, _, extra) in zip(stand_ins, entries, strict=True):
            info = zipfile.ZipInfo(stand_in)
            info.extra = extra
            archive.writestr(info, b"photo")
    payload = bytearray(buffer.getvalue())
    for stand_in, (name, flag) in stand_ins.items():
        for signature, name_at, flags_at in ((b"PK\3\4", 30, 6), (b"PK\1\2", 46, 8)):
            at = payload.index(signature)
            while not payload.startswith(stand_in.encode(), at + name_at):
                at = payload.index(signature, at + 1)
            payload[at + name_at : at + name_at + len(name)] = name
            payload[at + flags_at : at + flags_at + 2] = struct.pack("<H", UTF8_FLAG if flag else 0)
    return bytes(payload)


def unicode_path(stored: bytes, name: str) -> bytes:
    content = struct.pack("<BL", 1, zlib.crc32(stored)) + name.encode()
    return struct.pack("<HH", 0x7075, len(content)) + content


def names(tmp_path: Path, payload: bytes) -> list[str]:
    path = tmp_path / "people.zip"
    path.write_bytes(payload)
    return [member.path for member in iterate_members(path, LIMITS)]


def test_a_name_in_utf_8_needs_no_flag(tmp_path: Path) -> None:
    payload = zip_of((JOSE + b"/1.jpg", False, b""), (JOSE + b"/2.jpg", True, b""), (b"ada/1.jpg", False, b""))
    assert names(tmp_path, payload) == ["José/1.jpg", "José/2.jpg", "ada/1.jpg"]
    assert {member.read() for member in iterate_members(tmp_path / "people.zip", LIMITS)} == {b"photo"}


def test_the_unicode_extra_field_has_the_name_of_a_lossy_entry(tmp_path: Path) -> None:
    timestamp = struct.pack("<HHBL", 0x5455, 5, 1, 0)
    first, second, third = b"__/1.jpg", b"__/2.jpg", b"__/3.jpg"
    payload = zip_of(
        (first, False, timestamp + unicode_path(first, "田中/1.jpg")),
        (second, False, unicode_path(second, "佐藤/2.jpg") + timestamp),
        (third, False, unicode_path(b"earlier/3.jpg", "旧/3.jpg")),  # of a name that was changed since
    )
    assert names(tmp_path, payload) == ["田中/1.jpg", "佐藤/2.jpg", "__/3.jpg"]


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("code_page", ["cp932", "cp949", "gbk", "cp866", "cp437", "cp1252"])
def test_a_name_in_another_code_page_is_not_guessed(tmp_path: Path, code_page: str, flag: bool) -> None:
    person = {"cp932": "田中", "cp949": "김민준", "gbk": "王伟", "cp866": "Анна"}.get(code_page, "José")
    stored = f"{person}/1.jpg".encode(code_page)
    payload = zip_of((stored, flag, b""), (b"ada/1.jpg", False, b""))
    expected = stored.decode("utf-8", "surrogateescape")
    assert names(tmp_path, payload) == [expected, "ada/1.jpg"]
    found = read_contents(tmp_path / "people.zip", LIMITS, None, lambda: None)
    assert found.subjects["ada/1.jpg"] == "ada"
    assert all(name.encode() for name in found.subjects)  # can be stored


@pytest.mark.parametrize(
    "extra", [b"\x75\x70", b"\x75\x70\xff\0" + bytes(2), struct.pack("<HH", 0x7075, 3) + b"\1\0\0"]
)
def test_a_damaged_extra_field_is_no_name(extra: bytes) -> None:
    info = zipfile.ZipInfo("ada/1.jpg")
    info.extra = extra
    assert name_of(info) == "ada/1.jpg"


@pytest.mark.parametrize("extra", [b"\x99\x99\x32\x00ab", b"\x01\x00\xff\xff", b"\x75\x70\xff\x00ab"])
def test_an_extra_field_that_does_not_add_up_harms_no_entry(tmp_path: Path, extra: bytes) -> None:
    """zipfile rejects the whole archive."""
    payload = zip_of((b"ada/1.jpg", True, extra), (b"bob/1.jpg", True, b""), (b"eve/1.jpg", True, extra))
    assert names(tmp_path, payload) == ["ada/1.jpg", "bob/1.jpg", "eve/1.jpg"]
    assert {member.read() for member in iterate_members(tmp_path / "people.zip", LIMITS)} == {b"photo"}


def test_backslashes_separate_folders_in_zips_only(tmp_path: Path) -> None:
    """In a tar they belong to the name, which is no id. Two people would get one otherwise."""
    assert names(tmp_path, zip_of((b"ada\\2019\\1.jpg", False, b""))) == ["ada/2019/1.jpg"]
    with tarfile.open(tmp_path / "people.tar", "w") as archive:
        for name in ("Smith\\John/1.jpg", "Smith\\Jane/1.jpg"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    found = read_contents(tmp_path / "people.tar", LIMITS, None, lambda: None)
    assert set(found.subjects.values()) == {"Smith\\John", "Smith\\Jane"}
    for subject in found.subjects.values():
        with pytest.raises(ValueError, match="without '/'"):
            normalize_id(subject or "")

"""Names in archives mean what their writers wrote, or the archive is refused with an option that reads them."""

from __future__ import annotations

import io
import struct
import tarfile
import unicodedata
import zipfile
from pathlib import Path
from typing import Literal

import pytest

from kith.wire.identifiers import normalize_id
from service.core.errors import ArchiveInvalidError
from service.inference.archives import ArchiveLimits, iterate_members, read_contents

LIMITS = ArchiveLimits(1000, 100_000, 1_000_000)
UTF8_FLAG = 0x800


def zip_of(*entries: tuple[bytes, bool]) -> bytes:
    """Return a zip of files, each with the bytes of its name, and the flag for UTF-8."""
    buffer = io.BytesIO()
    stand_ins = {f"{number:x}".rjust(len(name), "~"): (name, flag) for number, (name, flag) in enumerate(entries)}
    with zipfile.ZipFile(buffer, "w") as archive:
        for stand_in in stand_ins:
            archive.writestr(stand_in, b"photo")
    payload = bytearray(buffer.getvalue())
    for stand_in, (name, flag) in stand_ins.items():
        for signature, name_at, flags_at in ((b"PK\3\4", 30, 6), (b"PK\1\2", 46, 8)):
            at = payload.index(signature)
            while not payload.startswith(stand_in.encode(), at + name_at):
                at = payload.index(signature, at + 1)
            payload[at + name_at : at + name_at + len(name)] = name
            payload[at + flags_at : at + flags_at + 2] = struct.pack("<H", UTF8_FLAG if flag else 0)
    return bytes(payload)


PEOPLE = {
    "gbk": ["石伟", "王伟", "王雪", "表中"],
    "cp932": ["田中", "表示", "ソニア", "能登"],
    "cp949": ["김민준", "채철"],
    "big5": ["許功蓋", "王"],
    "cp866": ["Анна", "Яна"],
    "cp1251": ["Анна", "Ёлкин"],
    "cp437": ["José"],
    "cp1252": ["José", "Zoë"],
}
"""Some have a backslash as the second byte of a character."""


def subjects(path: Path, encoding: str | None = None) -> set[str | None]:
    return set(read_contents(path, LIMITS, None, lambda: None, names=encoding).subjects.values())


@pytest.mark.parametrize("encoding", PEOPLE)
def test_names_in_another_encoding_are_refused_and_readable_with_the_option(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "people.zip"
    path.write_bytes(
        zip_of((b"ada/1.jpg", True), *((f"{name}/1.jpg".encode(encoding), False) for name in PEOPLE[encoding]))
    )
    with pytest.raises(ArchiveInvalidError, match="does not state the encoding") as raised:
        subjects(path)
    assert encoding in raised.value.remedy or encoding in ("cp437", "cp1252")
    assert subjects(path, encoding) == {"ada", *PEOPLE[encoding]}
    assert {member.read() for member in iterate_members(path, LIMITS, encoding)} == {b"photo"}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_in_utf_8_need_no_flag(tmp_path: Path, form: Literal["NFC", "NFD"]) -> None:
    """Archives of macOS have none."""
    people = {
        *("José", "Zoë Ñandú", "Łukasz Żak", "Nguyễn Đỗ", "Αλέξης", "Анна Ivanova", "Ян", "דן", "محمد", "田中 Renée"),
        *("김민준", "ソニア・表", "หญิง", "नेहा", "Gal·la", "\u02bbIolani", "\u0414\u02bcЯк", "Ada 👩\u200d🔬", "ada"),
    }
    path = tmp_path / "people.zip"
    path.write_bytes(
        zip_of(*((unicodedata.normalize(form, f"{name}/1.jpg").encode(), name == "Ян") for name in people))
    )
    assert subjects(path) == people


def test_names_that_read_as_utf_8_are_so_unless_another_does_not(tmp_path: Path) -> None:
    """The option reads them, too."""
    chance, other = (f"{name}/1.jpg".encode("gbk") for name in ("石伟", "王伟"))
    for path, pack in ((tmp_path / "people.zip", zip_of_undeclared), (tmp_path / "people.tar", gnu_tar_of)):
        path.write_bytes(pack(chance))
        assert subjects(path) == {chance.decode().partition("/")[0]}
        assert subjects(path, "gbk") == {"石伟"}
        path.write_bytes(pack(chance, other))
        with pytest.raises(ArchiveInvalidError, match="is not UTF-8"):
            subjects(path)


def zip_of_undeclared(*names: bytes) -> bytes:
    return zip_of(*((name, False) for name in names))


def test_names_of_files_need_no_encoding_if_no_person_depends_on_it(tmp_path: Path) -> None:
    path = tmp_path / "people.zip"
    path.write_bytes(zip_of(("ada/表.jpg".encode("cp932"), False)))
    found = read_contents(path, LIMITS, None, lambda: None)
    assert (set(found.subjects.values()), found.hidden) == ({"ada"}, 0)
    assert all(name.encode() for name in found.subjects)  # can be stored


def test_names_that_are_not_in_the_stated_encoding(tmp_path: Path) -> None:
    for path, payload in (
        (tmp_path / "flagged.zip", zip_of(("김민준/1.jpg".encode("cp949"), True))),
        (tmp_path / "people.zip", zip_of(("김민준/1.jpg".encode("cp949"), False))),
        (tmp_path / "people.tar", gnu_tar_of("김민준/1.jpg".encode("cp949"))),
    ):
        path.write_bytes(payload)
        with pytest.raises(ArchiveInvalidError, match="is not in utf"):
            subjects(path, "utf_8")


def gnu_tar_of(*names: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name.decode("latin-1")), io.BytesIO())
    return buffer.getvalue()


def test_backslashes_separate_folders_in_zips_only(tmp_path: Path) -> None:
    """In a tar they belong to the name, which is no id. Two people would get one otherwise."""
    path = tmp_path / "people.zip"
    path.write_bytes(zip_of((b"ada\\2019\\1.jpg", False)))
    assert [member.path for member in iterate_members(path, LIMITS)] == ["ada/2019/1.jpg"]
    (tmp_path / "people.tar").write_bytes(gnu_tar_of(b"Smith\\John/1.jpg", b"Smith\\Jane/1.jpg"))
    found = subjects(tmp_path / "people.tar")
    assert found == {"Smith\\John", "Smith\\Jane"}
    for subject in found:
        with pytest.raises(ValueError, match="without '/'"):
            normalize_id(subject or "")

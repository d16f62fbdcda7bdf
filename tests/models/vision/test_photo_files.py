"""One rule tells photos from other files, by content, for every folder and archive."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from models.vision.photo_files import (
    HEAD_BYTES,
    is_hidden,
    is_photo,
    list_photos,
    photo_format,
    printable_path,
    read_head,
)
from tests.service.inference.image_files import FORMATS, SMALL, encode, heic

PHOTOS = {kind: encode(SMALL, kind) for kind in (*FORMATS, "MPO")} | {
    "HEIC": heic(SMALL),
    "progressive JPEG": encode(SMALL, "JPEG", progressive=True),
    "big TIFF": encode(SMALL, "TIFF", big_tiff=True),
    "gray BMP": encode(SMALL.convert("L"), "BMP"),
}
OTHERS = {
    "text": b"BM is a text that begins like a bitmap, and is none",
    "empty": b"",
    "AppleDouble": b"\0\5\x16\7\0\2\0\0Mac OS X        ",
    "video": b"\0\0\0\x18ftypisom\0\0\0\0mp42isom" + bytes(100),
    "PDF": b"%PDF-1.7\n" + bytes(100),
    "WAV": b"RIFF\0\0\0\0WAVEfmt ",
    "zip": b"PK\3\4" + bytes(60),
}


@pytest.mark.parametrize("kind", PHOTOS)
def test_every_format_is_recognized_without_a_suffix(kind: str) -> None:
    head = PHOTOS[kind][:HEAD_BYTES]
    assert photo_format(head) is not None
    assert is_photo(PurePosixPath("ada/IMG_1"), lambda: head)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_content_is_no_photo_unless_the_suffix_announces_one(kind: str) -> None:
    assert photo_format(OTHERS[kind][:HEAD_BYTES]) is None
    assert not is_photo(PurePosixPath("ada/notes.txt"), lambda: OTHERS[kind])
    for suffix in (".jpg", ".JFIF", ".jpe", ".mpo", ".Png", ".heic"):
        assert is_photo(PurePosixPath(f"ada/1{suffix}"), lambda: OTHERS[kind])


def test_hidden_names() -> None:
    for name in ("._0.png", "ada/.ipynb_checkpoints/0.png", "__MACOSX/ada/0.png", "@eaDir/0.png", "ada/Thumbs.db"):
        assert is_hidden(PurePosixPath(name))
    for name in ("ada/0.png", "MACOSX/0.png", "./ada/0.png", "__/0.png"):
        assert not is_hidden(PurePosixPath(name))


def test_a_folder_is_listed_whole(tmp_path: Path) -> None:
    root = tmp_path / ".data" / "people"  # a hidden folder above does not hide the photos
    for name, content in {
        "ada/0.png": encode(SMALL, "PNG"),
        "ada/deep/er/IMG_1": encode(SMALL, "JPEG"),
        "ada/notes.txt": b"text",
        "ada/damaged.jpg": b"text",
        "ada/._0.png": OTHERS["AppleDouble"],
        "ada/.ipynb_checkpoints/0.png": encode(SMALL, "PNG"),
        "__MACOSX/ada/0.png": encode(SMALL, "PNG"),
        "group.jfif": encode(SMALL, "JPEG"),
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    os.mkfifo(root / "ada" / "pipe")
    (root / "ada" / "broken.jpg").symlink_to("nowhere")
    (root / "ada" / "linked.jpg").symlink_to(root / "group.jfif")
    (root / "ada" / "circle").symlink_to(root)
    (root / "bob").symlink_to(root / "ada" / "deep")
    listed = list_photos(root)
    assert [str(path.relative_to(root)) for path in listed.photos] == [
        "group.jfif",
        "ada/0.png",
        "ada/damaged.jpg",
        "ada/linked.jpg",
        "ada/deep/er/IMG_1",
        "bob/er/IMG_1",
    ]
    reason = "not a file, or a link to a missing file"
    assert {str(path.relative_to(root)): why for path, why in listed.ignored.items()} == {
        "ada/circle": "link to a folder",
        "ada/notes.txt": "not a photo",
        "ada/pipe": reason,
    }
    assert listed.unreadable == {root / "ada" / "broken.jpg": reason}
    assert listed.hidden == 3
    assert list_photos(tmp_path / "gone").unreadable == {tmp_path / "gone": "No such file or directory"}
    assert read_head(root / "ada" / "0.png") == encode(SMALL, "PNG")[:HEAD_BYTES]


def test_a_path_of_any_text_can_be_printed() -> None:
    assert printable_path("Ren\ud800") == "Ren\\ud800"  # as JSON may state it

"""WebDataset shards as tar, GNU and BSD, and the webdataset library write them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.training.mxnet_files import write_shard
from tests.training.runs import IMAGES, PEOPLE, write_people
from training.config import ConfigError, DataConfig
from training.data.identities import list_identities, load_identities
from training.data.shards import TarShards, split_name


def samples(people: Path, folder: Path, name: str) -> None:
    """Write an image and a label for each photo, named by a format of person and photo."""
    for file in sorted(people.rglob("*.png")):
        path = folder / name.format(person=file.parent.name, photo=file.stem)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.png").write_bytes(file.read_bytes())
        path.with_name(f"{path.name}.cls").write_text(file.parent.name[1:])


@pytest.mark.parametrize("name", ["{person}-{photo}", "{person}/{photo}", "deep.er/{person}.x/{photo}"])
@pytest.mark.parametrize("packed", [".", "*"])
def test_a_shard_made_by_tar(tmp_path: Path, name: str, packed: str) -> None:
    people = write_people(tmp_path / "people", side=112)
    samples(people, tmp_path / "samples", name)
    (tmp_path / "samples" / "README").write_text("text")
    (tmp_path / "samples" / "._x.png").write_bytes(b"\0\5\x16\7")
    (tmp_path / "shards").mkdir()
    shard = tmp_path / "shards" / "000.tar"
    subprocess.run(f"tar -cf {shard} {packed}", shell=True, cwd=tmp_path / "samples", check=True)  # noqa: S602
    (tmp_path / "shards" / "._000.tar").write_bytes(b"\0\5\x16\7")
    data = load_identities(DataConfig(tmp_path / "shards", None), tmp_path / "cache")
    assert (data.num_classes, len(data)) == (PEOPLE, PEOPLE * IMAGES)
    plain = load_identities(DataConfig(people, None), tmp_path / "cache")
    for label in range(PEOPLE):
        own, expected = (sorted(c.tobytes() for c in d.crops_NHWC[d.labels == label]) for d in (data, plain))
        assert own == expected


def test_names_are_split_as_the_webdataset_library_does() -> None:
    for path, expected in {
        "000.jpg": ("000", "jpg"),
        "./000.JPG": ("000", "jpg"),
        "./a.b/000.seg.png": ("a.b/000", "seg.png"),
        "a/000": ("", ""),
        "a.b/000": ("", ""),
        ".000.jpg": ("", ""),
        "__MACOSX/000.jpg": ("", ""),
    }.items():
        assert split_name(path) == expected


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "contains no image. Images have one of the extensions"),
        ([("README.txt", b"")], "contains no image"),
        ([("0.jpg", b"x")], "0 has no .cls file with its label"),
        ([("0.jpg", b"x"), ("0.cls", b"1"), ("1.jxl", b"x"), ("1.cls", b"1")], "1 has a label and no image"),
        ([("0.jpg", b"x"), ("./0.png", b"x"), ("0.cls", b"1")], "second image or label"),
        ([("0.jpg", b"x"), ("0.cls", b"1"), ("./0.cls", b"2")], "second image or label"),
        ([("0.jpg", b"x"), ("0.cls", b"ada")], "not a readable shard"),
        ([("0.jpg", b"x"), ("0.cls", str(2**63).encode())], "not an integer of 64 bits"),
        ([("0.jpg", b"x"), ("0.cls", b"1" + b" " * 1000)], "not an integer of 64 bits"),
    ],
)
def test_a_shard_that_is_not_whole_is_refused(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    folder = write_shard(tmp_path / "shards" / "000.tar", members)
    with pytest.raises(ConfigError) as raised:
        list_identities(DataConfig(folder, None))
    assert message in str(raised.value)
    assert "000.tar" in str(raised.value)


def test_a_link_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "samples"
    source.mkdir()
    (source / "0.jpg").write_bytes(b"x")
    os.link(source / "0.jpg", source / "1.jpg")
    (tmp_path / "shards").mkdir()
    subprocess.run(["tar", "-cf", tmp_path / "shards" / "000.tar", "."], cwd=source, check=True)
    with pytest.raises(ConfigError, match=r"\.jpg is a link; pack with tar -h --hard-dereference"):
        TarShards(tmp_path / "shards")


def test_a_name_that_is_not_utf_8_can_be_printed(tmp_path: Path) -> None:
    latin1 = os.fsdecode(b"Ren\xe9")
    members = ((f"{latin1}.png", b"broken"), (f"{latin1}.cls", b"1"))
    shards = TarShards(write_shard(tmp_path / "shards" / "000.tar", members))
    assert shards.name(0).endswith("000.tar, Ren\\xe9")
    assert np.array_equal(shards.labels, [1])

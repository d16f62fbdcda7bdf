"""Folder, manifest and record file give equal data; all problems of a set are reported."""

from __future__ import annotations

import csv
import pickle
import pickletools
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.vision.detection import Detector
from tests.training.mxnet_files import write_faces
from training.config import ConfigError, DataConfig
from training.data.identities import list_identities, load_identities
from training.data.preflight import preflight
from training.data.verification import read_bin

SKIN_RGB = (200, 150, 120)


def encoded(image_rgb: NDArray[np.uint8]) -> bytes:
    return cv2.imencode(".png", cv2.cvtColor(image_rgb, cv2.COLOR_RGB2BGR))[1].tobytes()


@pytest.fixture
def crops(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return 24 noisy crops, four for each of six people."""
    return np.clip(SKIN_RGB + rng.normal(0, 20, (24, 112, 112, 3)), 0, 255).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path, crops: NDArray[np.uint8]) -> Path:
    root = tmp_path / "people"
    for i, crop in enumerate(crops):
        file = root / f"p{i // 4}" / f"{i % 4}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(crop))
    return root


def by_folder(root: Path) -> DataConfig:
    return DataConfig(root, manifest=None)


def test_folder_and_manifest_are_read_alike(folder: Path) -> None:
    with (folder / "manifest.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["file", "identity"])
        for file in sorted(folder.glob("*/*.png")):
            writer.writerow([file.relative_to(folder), file.parent.name])
    one, two = list_identities(by_folder(folder)), list_identities(DataConfig(folder))
    assert [one.name(i) for i in range(24)] == [two.name(i) for i in range(24)]
    assert one.labels.tolist() == two.labels.tolist() == [i // 4 for i in range(24)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("file,identity\np0/0.png,René\n".encode("latin-1"), "Save it as CSV in UTF-8"),
        (b"file,identity\np0/0.png\n", "line 2 has too few columns"),
        (b"file,name\n", "has no column"),
        (b"\n", "has no column"),
        (b"file,identity\np0/9.png,a\np0/0.png,a\np1/0.png,b\np1/1.png,b\n", "p0/9.png cannot be read (No such file"),
    ],
)
def test_a_manifest_that_cannot_be_read(folder: Path, tmp_path: Path, content: bytes, message: str) -> None:
    (folder / "manifest.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_identities(DataConfig(folder), tmp_path / "cache")


def test_a_byte_order_mark_is_no_part_of_a_manifest(folder: Path) -> None:
    (folder / "manifest.csv").write_bytes("file,identity\np0/0.png,René\np1/0.png,b\n".encode("utf-8-sig"))
    assert list_identities(DataConfig(folder, min_images=1)).names == ("René", "b")
    (folder / "exclude.txt").write_bytes(b"Ren\xe9/0.png\n")
    with pytest.raises(ConfigError, match=r"exclude\.txt cannot be read"):
        list_identities(DataConfig(folder, manifest=None, exclude=folder / "exclude.txt"))


def test_people_with_too_few_images_are_excluded(folder: Path) -> None:
    shutil.rmtree(folder / "p0")
    (folder / "p1" / "0.png").unlink()
    listed = list_identities(replace(by_folder(folder), min_images=4))
    assert listed.names == ("p2", "p3", "p4", "p5")
    assert listed.dropped == 1
    assert list_identities(replace(by_folder(folder), min_images=4, max_identities=3)).names == ("p2", "p3", "p4")
    with pytest.raises(ConfigError, match="fewer than two"):
        list_identities(replace(by_folder(folder), min_images=5))


def test_a_damaged_or_unaligned_image_is_named(folder: Path, tmp_path: Path) -> None:
    file = folder / "p0" / "0.png"
    for damage in (b"broken", b""):
        file.write_bytes(damage)
        with pytest.raises(ConfigError, match=r"0\.png cannot be decoded"):
            load_identities(by_folder(folder), tmp_path / "cache")
    cv2.imwrite(str(file), np.zeros((50, 50, 3), np.uint8))
    for workers in (0, 1):  # from a cache, and streamed
        with pytest.raises(ConfigError, match=r"is 50x50, not a 112x112 crop\. Set data\.crop_px"):
            load_identities(replace(by_folder(folder), workers=workers), tmp_path / "cache").crops_NHWC[:1]
    cv2.imwrite(str(file), np.zeros((112, 112, 3), np.uint8))
    assert len(load_identities(by_folder(folder), tmp_path / "cache")) == 24


def test_photos_are_aligned_by_a_detector(
    tmp_path: Path,
    detector: Detector,
    astronaut: NDArray[np.uint8],
    actor: NDArray[np.uint8],
    nobody: NDArray[np.uint8],
) -> None:
    for name, photo in (("a", astronaut), ("b", actor)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i, image in enumerate((photo, photo[:, ::-1], nobody)):
            (tmp_path / "photos" / name / f"{i}.png").write_bytes(encoded(np.ascontiguousarray(image)))
    config = replace(by_folder(tmp_path / "photos"), aligned=False)
    data = load_identities(config, tmp_path / "cache", detector)
    assert data.labels.tolist() == [0, 0, 1, 1]  # the photo without a face is dropped
    assert data.crops_NHWC.shape[1:] == (112, 112, 3)
    with pytest.raises(ConfigError, match="need a detector"):
        load_identities(config, tmp_path / "empty")


def test_a_record_file_gives_the_crops_of_its_images(tmp_path: Path, crops: NDArray[np.uint8]) -> None:
    labels = [(i * 5) % 12 + 8 for i in range(24)]
    write_faces(tmp_path / "train.rec", [encoded(crop) for crop in crops], labels)
    data = load_identities(DataConfig(tmp_path / "train.rec"), tmp_path / "cache")
    assert data.names == tuple(map(str, range(8, 20)))  # by number, not by letter
    assert data.labels.tolist() == [i // 2 for i in range(24)]
    assert np.array_equal(data.crops_NHWC, crops[np.argsort(labels, kind="stable")])


def test_the_cache_is_built_once_and_again_when_an_image_changes(
    folder: Path, tmp_path: Path, crops: NDArray[np.uint8]
) -> None:
    cache, config = tmp_path / "cache", by_folder(folder)
    load_identities(config, cache)
    files = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    load_identities(replace(config, images_per_person=2), cache)
    assert {file: file.stat().st_mtime_ns for file in cache.iterdir()} == files
    (folder / "p0" / "0.png").write_bytes(encoded(255 - crops[0]))
    assert np.array_equal(load_identities(config, cache).crops_NHWC[0], 255 - crops[0])


def test_preflight_finds_everything_at_once(folder: Path, crops: NDArray[np.uint8]) -> None:
    valid = preflight(by_folder(folder))
    assert (valid.people, valid.images, valid.checked, valid.images_per_person) == (6, 24, 24, (4, 4.0, 4))
    assert valid.warnings == ()
    (folder / "p0" / "0.png").write_bytes(b"broken")
    (folder / "p0" / "1.png").write_bytes(encoded(np.zeros((96, 112, 3), np.uint8)))
    shutil.copy(folder / "p1" / "0.png", folder / "p1" / "1.png")
    shutil.copy(folder / "p2" / "0.png", folder / "p3" / "0.png")
    (folder / "single").mkdir()
    (folder / "single" / "0.png").write_bytes(encoded(crops[0]))
    found = preflight(by_folder(folder))
    (reason,) = found.unreadable
    assert reason.startswith(f"{folder / 'p0' / '0.png'} cannot be decoded (")
    assert reason in " ".join(found.warnings)  # whole
    assert found.wrong_size == (str(folder / "p0" / "1.png"),)
    assert found.duplicates_within == ((str(folder / "p1" / "0.png"), str(folder / "p1" / "1.png")),)
    assert found.duplicates_across == ((str(folder / "p2" / "0.png"), str(folder / "p3" / "0.png")),)
    assert found.people_dropped == 1
    said = " ".join(found.warnings)
    for words in ("cannot be read", "not 112x112", "more than one person", "repeat another", "too few images"):
        assert words in said
    assert len(found.warnings) == 5
    assert preflight(replace(by_folder(folder), aligned=False)).wrong_size == ()
    (folder / "p5" / "3.png").write_bytes(b"broken")
    sampled = preflight(by_folder(folder), sample=3)
    assert (sampled.images, sampled.checked) == (24, 3)
    assert [reason.split()[0][-8:] for reason in sampled.unreadable] == ["p0/0.png", "p5/3.png"]


def test_preflight_counts_unused_labels(tmp_path: Path, crops: NDArray[np.uint8]) -> None:
    write_faces(tmp_path / "train.rec", [encoded(c) for c in crops[:8]], [0, 0, 1, 1, 4, 4, 6, 6])
    found = preflight(DataConfig(tmp_path / "train.rec"))
    assert found.unused_labels == 3
    assert found.warnings[0].startswith("3 labels have no image")


def as_python2(pickled: bytes) -> bytes:
    """Rewrite a pickle of protocol 3 with Python 2 strings."""
    operations = list(pickletools.genops(pickled))
    ends = [begin for _, _, begin in operations[1:]] + [len(pickled)]
    out = pickle.PROTO + b"\x02"
    for (operation, value, begin), end in list(zip(operations, ends, strict=True))[1:]:
        if operation.name in ("BINUNICODE", "BINBYTES", "SHORT_BINBYTES"):
            raw = value.encode() if isinstance(value, str) else bytes(value or b"")
            out += pickle.BINSTRING + struct.pack("<i", len(raw)) + raw
        else:
            out += pickled[begin:end]
    return out


@pytest.mark.parametrize("as_array", [False, True])
def test_verification_sets_of_every_age(tmp_path: Path, crops: NDArray[np.uint8], as_array: bool) -> None:
    images: list[Any] = [encoded(crop) for crop in crops[:6]]
    same: list[Any] = [True, False, True]
    if as_array:
        images, same = [np.frombuffer(image, np.uint8).copy() for image in images], [np.bool_(s) for s in same]
    written = [pickle.dumps((images, same), protocol) for protocol in range(6)]
    written += [as_python2(written[3]), written[2].replace(b"numpy._core.multiarray", b"numpy.core.multiarray")]
    assert as_array == (written[2] != written[-1])
    for content in written:
        (tmp_path / "lfw.bin").write_bytes(content)
        found = read_bin(tmp_path / "lfw.bin")
        assert np.array_equal(found.crops_NHWC, crops[:6])
        assert found.same.dtype == bool
        assert found.same.tolist() == [True, False, True]


class Malice:
    """Object whose pickle runs code when loaded with pickle.load."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_a_pickle_that_runs_code_is_rejected(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    for protocol in range(6):
        payload = pickle.dumps(([Malice(target)], [True]), protocol)
        (tmp_path / "evil.bin").write_bytes(payload)
        with pytest.raises(ConfigError, match=r"evil\.bin: rejected: the file calls"):
            read_bin(tmp_path / "evil.bin")
        assert not target.exists()
        pickle.loads(payload)  # noqa: S301  (it was indeed dangerous)
        target.unlink()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a verification set"),
        (b"no pickle", "not a verification set"),
        (pickle.dumps(([b"a"], [True])), "1 images for 1 pairs"),
        (pickle.dumps(([b"a", b"b"], [True])), "image 0 cannot be decoded"),
        (pickle.dumps((["a", "b"], [True])), "must hold encoded images"),
        (pickle.dumps(([np.zeros(3), b"b"], [True])), "must hold encoded images"),
        (pickle.dumps(([b"a", b"b"], [0.5])), "one flag per pair"),
        (pickle.dumps(([encoded(np.zeros((96, 112, 3), np.uint8))] * 2, [True])), "image 0 is 112x96"),
        (pickle.dumps([b"a"] * 3), "not a verification set"),
    ],
)
def test_an_invalid_verification_set_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "lfw.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_bin(tmp_path / "lfw.bin")

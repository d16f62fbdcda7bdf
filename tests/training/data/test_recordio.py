"""Record files follow MXNet's layout, and damage is reported with its position."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.mxnet_files import pack, write_faces, write_records
from training.config import ConfigError
from training.data.recordio import MAGIC_BYTES, FaceRecords, RecordFile, unpack

# One whole record of five bytes, then one that holds the magic and is cut there: by hand, from dmlc-core's recordio.h.
WHOLE = bytes.fromhex("0a23d7ce 05000000") + b"abcde" + bytes(3)
CUT = bytes.fromhex("0a23d7ce 04000020") + b"wxyz" + bytes.fromhex("0a23d7ce 03000060") + b"123" + bytes(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.rec"


def test_the_bytes_are_those_of_the_format(path: Path) -> None:
    records = [(3, b"abcde"), (7, b"wxyz" + MAGIC_BYTES + b"123")]
    write_records(path, records)
    assert path.read_bytes() == WHOLE + CUT
    assert path.with_suffix(".idx").read_text() == "3\t0\n7\t16\n"
    file = RecordFile(path)
    assert file.keys.tolist() == [3, 7]
    assert [file.read(0), file.read(1)] == [r for _, r in records]


@given(st.lists(st.lists(st.sampled_from([MAGIC_BYTES, b"", b"a", b"bc", b"def", b"ghij"])).map(b"".join), min_size=1))
def test_any_bytes_round_trip(tmp_path_factory: pytest.TempPathFactory, records: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("records") / "train.rec"
    write_records(path, enumerate(records))
    file = RecordFile(path)
    assert [file.read(i) for i in range(len(file))] == records


def test_the_image_header_is_that_of_mxnet() -> None:
    assert pack(5.0, b"jpeg", 9) == struct.pack("<IfQQ", 0, 5.0, 9, 0) + b"jpeg"
    assert pack([5.0, 6.0], b"jpeg", 9) == struct.pack("<IfQQ2f", 2, 0.0, 9, 0, 5.0, 6.0) + b"jpeg"
    for labels in (5.0, [5.0, 6.0, 7.0]):
        read, image = unpack(pack(labels, b"jpeg", 9))
        assert read.tolist() == np.atleast_1d(labels).tolist()
        assert image == b"jpeg"
    for record in (b"short", pack([1.0, 2.0], b"", 0)[:-1]):
        with pytest.raises(ConfigError, match=f"{len(record)} bytes"):
            unpack(record)


def test_a_face_set_of_insightface(path: Path) -> None:
    images, labels = [bytes([i]) * 10 for i in range(6)], [1, 0, 2, 1, 0, 1]
    write_faces(path, images, labels)
    faces = FaceRecords(path)
    assert faces.keys.tolist() == [1, 2, 3, 4, 5, 6]
    assert faces.labels.tolist() == [0, 0, 1, 1, 1, 2]
    assert [faces.read_encoded(i)[0] for i in range(6)] == [1, 4, 0, 3, 5, 2]
    assert faces.name(0) == f"{path}, record 1"
    file = RecordFile(path)
    assert unpack(file.read(0))[0].tolist() == [7, 10]
    assert [unpack(file.read(row))[0].tolist() for row in (7, 8, 9)] == [[1, 3], [3, 6], [6, 7]]


def test_a_set_without_record_0_is_all_images(path: Path) -> None:
    """The first of several labels is the person; a magic in the id or the image cuts the record and loses nothing."""
    magic = struct.unpack("<I", MAGIC_BYTES)[0]
    records = [pack(4.0, b"a", 0), pack([2.0, 9.0], MAGIC_BYTES, 1), pack([3.0, 8.0], b"c", magic)]
    write_records(path, enumerate(records))
    faces = FaceRecords(path)
    assert faces.labels.tolist() == [4, 2, 3]
    assert [faces.read_encoded(i) for i in range(3)] == [b"a", MAGIC_BYTES, b"c"]


def test_images_that_the_header_counts_and_the_index_lacks(path: Path) -> None:
    write_faces(path, [b"a", b"b", b"c", b"d"], [0, 0, 1, 1])
    lines = path.with_suffix(".idx").read_text().splitlines(keepends=True)
    path.with_suffix(".idx").write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(ConfigError, match=r"counts 4 images, its \.idx lists 3"):
        FaceRecords(path)


@pytest.mark.parametrize("label", [-1.0, 0.5, float("nan"), float("inf")])
def test_a_label_that_is_no_class_is_named(path: Path, label: float) -> None:
    write_records(path, [(4, pack(1.0, b"a", 4)), (5, pack(label, b"a", 5))])
    with pytest.raises(ConfigError, match=r"train\.rec, record 5 has the label"):
        FaceRecords(path)


def test_damage_is_reported_with_its_position(path: Path) -> None:
    write_records(path, enumerate([pack(0.0, b"a" * 50, 0), pack(1.0, b"b" * 50, 1)]))
    whole, second = path.read_bytes(), 84
    path.write_bytes(whole[:-10])
    with pytest.raises(ConfigError, match=f"ends within the record at byte {second}"):
        RecordFile(path).read(1)
    for damaged in (whole[:second], whole[:second] + b"XXXX" + whole[second + 4 :]):
        path.write_bytes(damaged)
        for read in (lambda: RecordFile(path).read(1), lambda: FaceRecords(path)):
            with pytest.raises(ConfigError, match=f"(no|within the) record at byte {second}"):
                read()
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="missing or empty"):
        RecordFile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "missing"),
        ("", "is empty"),
        ("0\tx\n", "not an index"),
        ("0\t1\t2\n", "3 columns"),
        ("0\t-1\n", "not an index"),
        ("0\t9999\n", "within the record at byte 9999"),
        ("0\t28\n", "no record at byte 28"),  # the middle of one
    ],
)
def test_an_invalid_index_is_rejected(path: Path, text: str | None, message: str) -> None:
    path.write_bytes(WHOLE + CUT)
    if text is not None:
        path.with_suffix(".idx").write_text(text)
    with pytest.raises(ConfigError, match=message):
        RecordFile(path).read(0)

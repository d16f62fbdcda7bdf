"""Labels written by `kith-train annotate`."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.manifest import ModelPack
from training.config import ConfigError
from training.detection.annotate import annotate_photos
from training.detection.photos import load_annotated


@pytest.fixture
def folder(tmp_path: Path, astronaut: NDArray[np.uint8], nobody: NDArray[np.uint8]) -> Path:
    (tmp_path / "some").mkdir()
    (tmp_path / "notes.txt").write_text("not a photo")
    for name, image in (("some/a.png", astronaut), ("some/b.jpg", nobody), ("c.png", astronaut[:, ::-1])):
        cv2.imwrite(str(tmp_path / name), cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2BGR))
    return tmp_path


def test_every_photo_gets_a_row_with_its_faces(folder: Path, pack: ModelPack) -> None:
    count = annotate_photos(folder, pack.detection)
    rows = [json.loads(line) for line in (folder / "annotations.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == ["c.png", "some/a.png", "some/b.jpg"]
    assert sum(len(row["faces"]) for row in rows) == count
    certain = [(~photo.doubtful).sum() for photo in load_annotated(folder)]
    assert certain == [1, 1, 0]
    mirrored, plain = (photo.boxes[0] for photo in load_annotated(folder)[:2])
    assert 512 - mirrored[[2, 0]] == pytest.approx(plain[[0, 2]], abs=12)


def test_small_faces_are_found_at_twice_the_size(tmp_path: Path, group: NDArray[np.uint8], pack: ModelPack) -> None:
    """The six people of a photo scaled to 300 pixels have faces of 15 pixels."""
    small = cv2.resize(cv2.cvtColor(group, cv2.COLOR_RGB2BGR), (300, 208), interpolation=cv2.INTER_AREA)
    cv2.imwrite(str(tmp_path / "small.png"), small)
    annotate_photos(tmp_path, pack.detection)
    (photo,) = load_annotated(tmp_path)
    assert (~photo.doubtful).sum() == 6


def test_photos_can_be_left_out(folder: Path, pack: ModelPack) -> None:
    annotate_photos(folder, pack.detection, exclude=["some/a.png"], limit=1)
    (row,) = (json.loads(line) for line in (folder / "annotations.jsonl").read_text().splitlines())
    assert row["file"] == "c.png"


def test_annotations_are_only_replaced_on_request(folder: Path, pack: ModelPack) -> None:
    manual = folder / "annotations.jsonl"
    manual.write_text("made by hand")
    with pytest.raises(ConfigError, match="--replace"):
        annotate_photos(folder, pack.detection)
    assert manual.read_text() == "made by hand"
    annotate_photos(folder, pack.detection, replace=True)
    assert len(load_annotated(folder)) == 3


def test_a_folder_without_photos_is_rejected(tmp_path: Path, pack: ModelPack) -> None:
    with pytest.raises(ConfigError, match="contains no photo"):
        annotate_photos(tmp_path, pack.detection)

"""Annotated photos: which faces count."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from training.config import ConfigError
from training.detection.photos import MAX_PHOTO_SIDE_PX, list_annotated, read_annotated

FACE = {"landmarks": [[1.0, 1.0]] * 5, "score": 0.9}


@pytest.fixture
def folder(tmp_path: Path, astronaut: NDArray[np.uint8]) -> Path:
    cv2.imwrite(str(tmp_path / "a.png"), cv2.resize(astronaut, (1000, 500)))
    return tmp_path


def annotate(folder: Path, *rows: dict[str, object]) -> None:
    text = "".join(json.dumps({"file": "a.png", **row}) + "\n" for row in rows)
    (folder / "annotations.jsonl").write_text(text)


def test_large_photos_are_scaled_with_their_faces(folder: Path) -> None:
    annotate(folder, {"faces": [{**FACE, "box_xyxy": [100, 50, 600, 450]}]})
    (photo,) = read_annotated(list_annotated(folder))
    scale = MAX_PHOTO_SIDE_PX / 1000
    assert photo.image.shape[:2] == (round(500 * scale), MAX_PHOTO_SIDE_PX)
    assert photo.boxes[0] == pytest.approx(np.array([100, 50, 600, 450]) * scale)


def test_annotated_boxes_win_and_other_detections_are_doubtful(folder: Path) -> None:
    seen = [{**FACE, "box_xyxy": [0, 0, 48, 52]}, {**FACE, "box_xyxy": [300, 300, 350, 350]}]
    annotate(folder, {"boxes_xyxy": [[0, 0, 50, 50]], "yunet": seen, "split": "val"})
    assert list_annotated(folder, "train") == []
    (photo,) = read_annotated(list_annotated(folder, "val"))
    assert photo.doubtful.tolist() == [False, True]


def test_boxes_need_no_detector(folder: Path) -> None:
    annotate(folder, {"boxes_xyxy": [[0, 0, 50, 50]]})
    (photo,) = read_annotated(list_annotated(folder))
    assert photo.boxes.shape == (1, 4)
    (folder / "annotations.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="not JSON lines"):
        list_annotated(folder)


def test_photos_are_read_when_they_are_used(folder: Path) -> None:
    annotate(folder, {}, {"file": "nowhere.png"})
    listed = list_annotated(folder)
    assert len(listed) == 2
    assert next(read_annotated(listed[:1])).image.shape[2] == 3
    with pytest.raises(ConfigError, match="nowhere"):
        list(read_annotated(listed))


def test_folders_without_annotations_are_rejected(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Name a folder of annotated photos"):
        list_annotated(folder)

"""Requests choose the effort of face detection, and photos that should show a face get more by default."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.refusals import refusal
from tests.service.cli.conftest import Program, written

Photo = NDArray[np.uint8]


@pytest.fixture(scope="module")
def sideways(astronaut: Photo) -> bytes:
    """Small, as the detector finds large sideways faces, with wrong landmarks."""
    small = np.asarray(cv2.resize(astronaut, None, fx=0.35, fy=0.35, interpolation=cv2.INTER_AREA), np.uint8)
    return jpeg(np.rot90(small, 3), 95)


@pytest.fixture(scope="module")
def hall(group: Photo) -> bytes:
    """Six people with faces of about 40 pixels in a photo of 4000x3000 pixels."""
    small = np.asarray(cv2.resize(group, None, fx=0.4, fy=0.4, interpolation=cv2.INTER_AREA), np.uint8)
    photo = np.full((3000, 4000, 3), 90, np.uint8)
    photo[1200 : 1200 + small.shape[0], 900 : 900 + small.shape[1]] = small
    return jpeg(photo, 95)


def test_small_faces_are_found_at_high(kith: Kith, gallery: str, hall: bytes) -> None:
    (low,), (high,) = kith.detect(hall).images, kith.detect(hall, detail="high").images
    assert len(low.faces) < len(high.faces) == 6
    assert (low.min_face_px, high.min_face_px) == (125, 31.2)
    assert all(31.2 < face.box[2] - face.box[0] < 125 for face in high.faces)
    assert refusal(kith.enroll, gallery, "all", hall, detail="high")[1] == "several_faces"


def test_a_sideways_photo_is_looked_at_again_on_request_and_where_a_face_is_due(
    kith: Kith, gallery: str, server: str, sideways: bytes, astronaut: Photo, tmp_path: Path
) -> None:
    (face,) = kith.detect(sideways, detail="medium").images[0].faces
    assert abs(face.quality.roll_deg - 90) < 15
    assert kith.detect(sideways).images[0].faces == []
    assert kith.identify(gallery, sideways).results[0].outcome == "no_face"
    assert kith.verify(sideways, jpeg(astronaut)).outcome == "same"
    assert refusal(kith.enroll, gallery, "eileen", sideways, detail="low")[1] == "no_face"
    assert kith.enroll(gallery, "eileen", sideways).enrolled_count == 1

    photo, run, of = tmp_path / "people" / "ada" / "sideways.jpg", Program(tmp_path, server), ("-g", gallery)
    written(tmp_path, {"people/ada/sideways.jpg": sideways})
    assert "no_face" in run("enroll", "people", *of, "--detail", "low", status=1)
    assert "duplicate_subject" in run("enroll", "people", *of, status=1)
    for command in (("detect",), ("embed",), ("identify", *of), ("verify", str(photo))):
        for detail, status in (("low", 1), ("high", 0)):
            run(*command, photo, "--detail", detail, status=status)


def test_the_setting_is_the_default(tmp_path: Path, sideways: bytes) -> None:
    with embedded(load_settings(data_dir=tmp_path, log_level="WARNING", detail="high")) as url, Kith(url) as kith:
        kith.create_gallery("g")
        assert len(kith.detect(sideways).images[0].faces) == 1
        assert kith.identify("g", sideways).results[0].outcome != "no_face"
        assert kith.detect(sideways, detail="low").images[0].faces == []

"""Whatever of a large photo is decoded, and however it is stored, its answer is that of the whole, upright photo."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from kith.wire.faces import PhotoOut
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg

Photo = NDArray[np.uint8]


@pytest.fixture(scope="module")
def kith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kith]:
    """Exact: INT8 takes two decodings of a photo for more different than they are."""
    data: Path = tmp_path_factory.mktemp("exact")
    settings = load_settings(data_dir=data, log_level="WARNING", runtime="onnxruntime,fp32")
    with embedded(settings) as url, Kith(url) as client:
        yield client


def enlarged(photo: Photo, factor: float, noise: float) -> Photo:
    """Photo with camera noise, so that it has fine detail."""
    large = np.asarray(cv2.resize(photo, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC), np.float32)
    grain = np.random.default_rng(0).normal(0, noise, large.shape)
    return np.asarray(np.clip(large + grain, 0, 255), np.uint8)


def uncompressed(payload: bytes) -> bytes:
    """The same pixels, in a format that is always decoded whole."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(payload)) as image:
        image.save(buffer, "BMP")
    return buffer.getvalue()


def check(found: PhotoOut, expected: PhotoOut, box_px: float, cosine: float) -> None:
    assert (found.width, found.height) == (expected.width, expected.height)
    assert len(found.faces) == len(expected.faces) > 0
    pairs = zip(*(sorted(photo.faces, key=lambda face: face.box) for photo in (found, expected)), strict=True)
    for face, whole in pairs:  # not by score, of which some are nearly equal
        assert np.abs(np.array(face.box) - whole.box).max() < box_px
        assert face.embedding is not None
        assert whole.embedding is not None
        assert float(np.dot(face.embedding, whole.embedding)) > cosine
        for value in ("eye_distance_px", "brightness", "contrast", "score"):
            assert getattr(face.quality, value) == pytest.approx(getattr(whole.quality, value), rel=0.02)
        # Of the whole photo, bilinear sampling skips pixels, and takes grain and edges for sharper than they are.
        assert 0.75 < face.quality.sharpness / whole.quality.sharpness < 1.05


def test_a_large_face_is_cut_from_a_reduced_photo(kith: Kith, astronaut: Photo) -> None:
    photo = jpeg(enlarged(astronaut, 4, 4), 95)
    (found,), (expected,) = kith.embed(photo).images, kith.embed(uncompressed(photo)).images
    check(found, expected, 1 / (640 / 2048), 0.995)


def test_small_faces_are_cut_from_the_whole_photo(kith: Kith, group: Photo) -> None:
    photo = jpeg(np.pad(group, ((300, 400), (640, 640), (0, 0)), constant_values=128), 95)
    (found,), (expected,) = kith.embed(photo).images, kith.embed(uncompressed(photo)).images
    assert len(found.faces) == 6
    check(found, expected, 1 / (640 / 2560), 0.995)

"""Accepted photos and embeddings."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from kith.photos import encode_photo


def test_all_photo_types_give_the_same_result(kith: Kith, astronaut: NDArray[np.uint8], tmp_path: Path) -> None:
    file, image = io.BytesIO(), Image.fromarray(astronaut)
    image.save(file, "PNG")
    path = tmp_path / "astronaut.png"
    path.write_bytes(file.getvalue())
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(astronaut)))
    turned.getexif()[0x0112] = 6  # orientation of a rotated camera
    with path.open("rb") as opened:
        given = (path, str(path), file.getvalue(), memoryview(file.getvalue()), opened, image, astronaut, turned)
        found = [kith.detect(photo).images[0] for photo in given]
    assert found[0].faces
    assert all(one == found[0] for one in found)
    gray = kith.detect(np.asarray(image.convert("L"))).images[0]
    assert gray == kith.detect(image.convert("L")).images[0]
    assert len(kith.detect(image.convert("CMYK"), *given[:2]).images) == 3


@pytest.mark.parametrize(
    ("photo", "said"),
    [
        (3, "int is not a photo"),
        (io.StringIO("text"), "open in text mode"),
        (np.zeros((4, 4, 3), np.float32), r"float32 \(4, 4, 3\) is not a photo"),
        (np.zeros((4, 4), np.float32), "mode F is not a photo"),
        (np.zeros((4, 4, 7), np.uint8), "is not a photo"),
        ("https://cdn.example.org/ada.jpg", "urls="),
    ],
)
def test_an_invalid_photo_is_refused_with_the_reason(kith: Kith, photo: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        kith.detect(photo)


def test_an_embedding_is_a_list_of_floats_that_can_be_sent_again(
    kith: Kith, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    seen = kith.embed(astronaut)
    vector = seen.images[0].faces[0].embedding
    assert vector is not None
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    kith.enroll(gallery, "ada", embeddings=[vector], recognizer=seen.recognizer)
    (found,) = kith.identify(gallery, embeddings=[vector]).results
    assert (found.subject, found.similarity) == ("ada", 1.0)
    assert kith.verify((gallery, "ada"), vector).outcome == "same"
    assert type(seen).model_validate_json(seen.model_dump_json()).images[0].faces[0].embedding == vector


def test_a_16_bit_gray_image_keeps_its_values() -> None:
    gray = np.arange(0, 60_000, 1000, dtype=np.uint16).reshape(6, 10)
    for photo in (gray, Image.fromarray(gray)):
        assert (np.asarray(Image.open(io.BytesIO(encode_photo(photo)))) == gray).all()


@pytest.mark.parametrize("mode", ["F", "I", "I;16B", "La", "RGBa"])
def test_an_image_mode_without_a_white_level_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"mode {mode} is not a photo: convert it"):
        encode_photo(Image.new(mode, (4, 4)))


def test_an_embedding_with_nan_is_refused() -> None:
    with Kith("http://127.0.0.1:9") as kith, pytest.raises(ValueError, match="NaN"):
        kith.identify("g", embeddings=[[float("nan"), 1.0]])

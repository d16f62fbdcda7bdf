"""Input planes are bit-exact normalized pixels."""

from __future__ import annotations

import numpy as np
import pytest

from models.vision.pixels import to_planes
from models.vision.specs import ColorOrder, Normalization


@pytest.mark.parametrize("color", ["RGB", "BGR"])
def test_planes_hold_normalized_pixels_and_keep_the_rest(color: ColorOrder, rng: np.random.Generator) -> None:
    images = [rng.integers(0, 256, (height, 7, 3), dtype=np.uint8) for height in (5, 8)]
    images.append(rng.integers(0, 256, (16, 14, 3), dtype=np.uint8)[::2, ::2])  # strided view
    out = to_planes(images, Normalization(127.5, 128.0, color), np.full((3, 3, 9, 8), 7, np.float32))
    for image, planes in zip(images, out, strict=True):
        wanted = (image[..., :: 1 if color == "RGB" else -1].astype(np.float64) - 127.5) / 128
        np.testing.assert_allclose(planes[:, : image.shape[0], :7].transpose(1, 2, 0), wanted, rtol=1e-6)
        assert (planes[:, image.shape[0] :] == 7).all()
        assert (planes[:, :, 7:] == 7).all()

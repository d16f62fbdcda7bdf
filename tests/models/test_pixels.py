"""Planes are what a network is fed, to the last bit of float32."""

from __future__ import annotations

import numpy as np
import pytest

from models.pack import ColourOrder, Normalisation
from models.pixels import to_planes


@pytest.mark.parametrize("colour", ["RGB", "BGR"])
def test_planes_are_the_normalised_pixels_and_the_rest_stays(colour: ColourOrder, rng: np.random.Generator) -> None:
    images = [rng.integers(0, 256, (height, 7, 3), dtype=np.uint8) for height in (5, 8)]
    images.append(rng.integers(0, 256, (16, 14, 3), dtype=np.uint8)[::2, ::2])  # every other pixel of a larger one
    out = to_planes(images, Normalisation(127.5, 128.0, colour), np.full((3, 3, 9, 8), 7, np.float32))
    for image, planes in zip(images, out, strict=True):
        wanted = (image[..., :: 1 if colour == "RGB" else -1].astype(np.float64) - 127.5) / 128
        np.testing.assert_allclose(planes[:, : image.shape[0], :7].transpose(1, 2, 0), wanted, rtol=1e-6)
        assert (planes[:, image.shape[0] :] == 7).all()
        assert (planes[:, :, 7:] == 7).all()

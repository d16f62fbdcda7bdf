"""Pixels to what networks are fed: interleaved bytes to normalised planes."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from models.network import Float
from models.pack import Normalisation


def to_planes(
    images: Sequence[NDArray[np.uint8]] | NDArray[np.uint8], normalisation: Normalisation, out: Float
) -> Float:
    """Write (h, w, 3) uint8 RGB images into the top left corners of ``out`` (n, 3, H, W) float32, as (pixel - mean) /
    std in the network's colour order; the rest of ``out`` stays as it is. Returns ``out``."""
    mean, scale = np.float32(normalisation.mean), np.float32(1 / normalisation.std)
    order = (2, 1, 0) if normalisation.colour == "BGR" else (0, 1, 2)
    for image, planes in zip(images, out, strict=True):
        # OpenCV takes the channels apart with vector instructions; numpy strides over them, at half the speed.
        channels = cv2.split(image)
        for plane, channel in zip(planes[:, : image.shape[0], : image.shape[1]], order, strict=True):
            np.copyto(plane, channels[channel])
            plane -= mean
            plane *= scale
    return out

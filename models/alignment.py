"""Five-point face alignment: landmarks in a photo to a canonical 112x112 crop. Pure numpy and cv2.

The template is the one every ArcFace-style recogniser is trained on (InsightFace, ``arcface_dst``): five points, in
pixels of a 112x112 crop, in the order left eye, right eye, nose tip, left and right mouth corner as seen in the image.
The transform is the least-squares similarity of S. Umeyama, "Least-squares estimation of transformation parameters
between two point patterns", PAMI 13(4), 1991, equations (40)-(42), restricted to two dimensions, where it is linear.
"""

from __future__ import annotations

from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

CROP_SIZE_PX: Final = 112
TEMPLATE_XY: Final[NDArray[np.float64]] = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)


def similarity_transforms(landmarks_xy: NDArray[np.floating], size_px: int = CROP_SIZE_PX) -> NDArray[np.float64]:
    """Return the similarities that map landmarks onto the template, fitted for all faces at once.

    Args:
        landmarks_xy: (n, 5, 2) pixels of the photo.
        size_px: side of the crop; the template scales with it.

    Returns:
        (n, 2, 3) matrices from photo pixels to crop pixels.

    Raises:
        ValueError: a shape other than (n, 5, 2), a non-finite landmark, or five coincident landmarks.
    """
    points = np.asarray(landmarks_xy, dtype=np.float64)
    if points.ndim != 3 or points.shape[1:] != (5, 2):
        raise ValueError(f"landmarks must have shape (n, 5, 2), not {points.shape}")
    if not np.isfinite(points).all():
        raise ValueError("landmarks must be finite")
    template = TEMPLATE_XY * (size_px / CROP_SIZE_PX)
    source_mean, target_mean = points.mean(axis=1), template.mean(axis=0)
    source, target = points - source_mean[:, None], template - target_mean
    spread = (source**2).sum(axis=(1, 2))
    if (spread < 1e-6).any():
        raise ValueError("the five landmarks of a face coincide: no similarity can be fitted")
    # As complex numbers a rotation with scale is one multiplication, target = a * source, so that least squares has
    # the closed form a = <source, target> / <source, source>; reflections cannot occur.
    source_c, target_c = source[..., 0] + 1j * source[..., 1], target[..., 0] + 1j * target[..., 1]
    a = (source_c.conj() * target_c).sum(axis=1) / spread
    matrices = np.empty((len(points), 2, 3))
    matrices[:, 0, 0], matrices[:, 0, 1] = a.real, -a.imag
    matrices[:, 1, 0], matrices[:, 1, 1] = a.imag, a.real
    matrices[:, :, 2] = target_mean - np.einsum("nij,nj->ni", matrices[:, :, :2], source_mean)
    return matrices


def align(image: NDArray[np.uint8], landmarks_xy: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Cut the aligned crops of all faces of one image.

    Args:
        image: (H, W, 3) uint8; the colour order is kept.
        landmarks_xy: (n, 5, 2) pixels of that image.

    Returns:
        (n, 112, 112, 3) uint8 crops; what lies outside the image is black.
    """
    matrices = similarity_transforms(landmarks_xy)
    crops = np.empty((len(matrices), CROP_SIZE_PX, CROP_SIZE_PX, 3), np.uint8)
    for matrix, crop in zip(matrices, crops, strict=True):
        crop[:] = cv2.warpAffine(image, matrix, (CROP_SIZE_PX, CROP_SIZE_PX), flags=cv2.INTER_LINEAR)
    return crops


def transform_points(matrix: NDArray[np.floating], points_xy: NDArray[np.floating]) -> NDArray[np.float64]:
    """Apply one (2, 3) matrix to (..., 2) points."""
    m = np.asarray(matrix, dtype=np.float64)
    return np.asarray(points_xy, dtype=np.float64) @ m[:, :2].T + m[:, 2]

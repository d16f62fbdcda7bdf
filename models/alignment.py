"""Five-point face alignment: landmarks in a photo to a canonical crop. Pure numpy and cv2.

The standard template is the one every ArcFace-style recogniser is trained on (InsightFace, ``arcface_dst``): five
points, in pixels of a 112x112 crop, in the order left eye, right eye, nose tip, left and right mouth corner as seen in
the image. A recogniser that was trained on other crops brings a template of its own.
The transform is the least-squares similarity of S. Umeyama, "Least-squares estimation of transformation parameters
between two point patterns", PAMI 13(4), 1991, equations (40)-(42), restricted to two dimensions, where it is linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

CROP_SIZE_PX: Final = 112
TEMPLATE_XY: Final[NDArray[np.float64]] = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
POINTS: Final = len(TEMPLATE_XY)


@dataclass(frozen=True)
class Alignment:
    """The crop a recogniser was trained on: ``size_px``, side of the square, and ``template``, where the five points
    go in it, (x, y) in its pixels."""

    size_px: int
    template: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if self.size_px <= 0 or len(self.template) != POINTS:
            raise ValueError(f"an alignment has a positive size and {POINTS} points")

    @property
    def template_xy(self) -> NDArray[np.float64]:
        """(5, 2)."""
        return np.array(self.template)

    @property
    def is_standard(self) -> bool:
        return self == standard(self.size_px)


def standard(size_px: int) -> Alignment:
    """The standard template, scaled to a crop of another size as InsightFace does for multiples of 112."""
    points = (TEMPLATE_XY * (size_px / CROP_SIZE_PX)).tolist()
    return Alignment(size_px, tuple((x, y) for x, y in points))


STANDARD: Final = standard(CROP_SIZE_PX)


def similarity_transforms(landmarks_xy: NDArray[np.floating], alignment: Alignment = STANDARD) -> NDArray[np.float64]:
    """Return the similarities that map landmarks onto the template, fitted for all faces at once.

    Args:
        landmarks_xy: (n, 5, 2) pixels of the photo.
        alignment: whose template.

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
    template = alignment.template_xy
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


def scales(landmarks_xy: NDArray[np.floating], alignment: Alignment = STANDARD) -> NDArray[np.float64]:
    """(n,) pixels of the crop per pixel of the photo, of each face; see similarity_transforms."""
    matrices = similarity_transforms(landmarks_xy, alignment)
    return np.asarray(np.hypot(matrices[:, 0, 0], matrices[:, 1, 0]), np.float64)


def align(
    image: NDArray[np.uint8], landmarks_xy: NDArray[np.floating], alignment: Alignment = STANDARD
) -> NDArray[np.uint8]:
    """Cut the aligned crops of all faces of one image.

    Args:
        image: (H, W, 3) uint8; the colour order is kept.
        landmarks_xy: (n, 5, 2) pixels of that image.
        alignment: of the recogniser that the crops are for.

    Returns:
        (n, size_px, size_px, 3) uint8 crops; what lies outside the image is black.
    """
    matrices = similarity_transforms(landmarks_xy, alignment)
    size = (alignment.size_px, alignment.size_px)
    crops = np.empty((len(matrices), *size, 3), np.uint8)
    for matrix, crop in zip(matrices, crops, strict=True):
        cv2.warpAffine(image, matrix, size, dst=crop, flags=cv2.INTER_LINEAR)
    return crops


def recut(crops_NHWC: NDArray[np.uint8], alignment: Alignment) -> NDArray[np.uint8]:
    """(n, 112, 112, 3) standard crops as another alignment would have cut them, for data that exists only as crops:
    what a standard crop does not show is its border, repeated."""
    if alignment == STANDARD:
        return crops_NHWC
    (matrix,) = similarity_transforms(TEMPLATE_XY[None], alignment)
    size = (alignment.size_px, alignment.size_px)
    cut = np.empty((len(crops_NHWC), *size, 3), np.uint8)
    for crop, out in zip(crops_NHWC, cut, strict=True):
        out[:] = cv2.warpAffine(crop, matrix, size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    return cut


def transform_points(matrix: NDArray[np.floating], points_xy: NDArray[np.floating]) -> NDArray[np.float64]:
    """Apply one (2, 3) matrix to (..., 2) points."""
    m = np.asarray(matrix, dtype=np.float64)
    return np.asarray(points_xy, dtype=np.float64) @ m[:, :2].T + m[:, 2]

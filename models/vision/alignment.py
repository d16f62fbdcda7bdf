"""Face alignment with five landmarks.

The standard template is ``arcface_dst`` of InsightFace: left eye, right eye, nose tip, left and right mouth corner as
seen in the image, in pixels of a 112x112 crop. Recognizers trained on other crops define their own template.

The transform is the least-squares similarity of S. Umeyama, "Least-squares estimation of transformation parameters
between two point patterns", PAMI 13(4), 1991, equations (40)-(42), which is linear in two dimensions.
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
WIDE_CROP_SIZE_PX: Final = 128
WIDE_CROP_MARGIN_PX: Final = 8
"""InsightFace's crops of 128 pixels hold the standard crop with a margin at the left, the right and the bottom."""
LANDMARK_COUNT: Final = len(TEMPLATE_XY)


@dataclass(frozen=True)
class Alignment:
    """Geometry of a network's crops: side ``size_px``, and the (x, y) of the five landmarks in crop pixels."""

    size_px: int
    template: tuple[tuple[float, float], ...]

    @property
    def template_xy(self) -> NDArray[np.float64]:
        """Template points as a (5, 2) array."""
        return np.array(self.template)

    @property
    def is_standard(self) -> bool:
        """Equality with the standard template scaled to this size."""
        return self == standard_alignment(self.size_px)


def standard_alignment(size_px: int) -> Alignment:
    """Return the standard template scaled to another crop size, as InsightFace does for multiples of 112."""
    points = (TEMPLATE_XY * (size_px / CROP_SIZE_PX)).tolist()
    return Alignment(size_px, tuple((x, y) for x, y in points))


def insightface_alignment(size_px: int) -> Alignment | None:
    """Return the alignment of ``insightface.utils.face_align`` for a crop size; None where it defines none."""
    if size_px % CROP_SIZE_PX == 0:
        return standard_alignment(size_px)
    if size_px % WIDE_CROP_SIZE_PX:
        return None
    scale = size_px / WIDE_CROP_SIZE_PX
    points = ((TEMPLATE_XY + (WIDE_CROP_MARGIN_PX, 0)) * scale).tolist()
    return Alignment(size_px, tuple((x, y) for x, y in points))


STANDARD_ALIGNMENT: Final = standard_alignment(CROP_SIZE_PX)


def standard_crop_px(alignment: Alignment) -> int:
    """Return the side of the standard crops from which those of an alignment come: its own, or 112 for a template of
    its own, whose crops `realign_crops` cuts."""
    return alignment.size_px if alignment.is_standard else CROP_SIZE_PX


def similarity_transforms(
    landmarks_xy: NDArray[np.floating], alignment: Alignment = STANDARD_ALIGNMENT
) -> NDArray[np.float64]:
    """Fit the similarity transforms that map landmarks onto the template.

    Args:
        landmarks_xy: (n, 5, 2) photo pixels.
        alignment: target template.

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
    # In complex numbers, rotation and scale are one factor: target = a * source. Least squares gives
    # a = <source, target> / <source, source>, which excludes reflections.
    source_c, target_c = source[..., 0] + 1j * source[..., 1], target[..., 0] + 1j * target[..., 1]
    a = (source_c.conj() * target_c).sum(axis=1) / spread
    matrices = np.empty((len(points), 2, 3))
    matrices[:, 0, 0], matrices[:, 0, 1] = a.real, -a.imag
    matrices[:, 1, 0], matrices[:, 1, 1] = a.imag, a.real
    matrices[:, :, 2] = target_mean - np.einsum("nij,nj->ni", matrices[:, :, :2], source_mean)
    return matrices


def crop_scales(landmarks_xy: NDArray[np.floating], alignment: Alignment = STANDARD_ALIGNMENT) -> NDArray[np.float64]:
    """Return the (n,) crop pixels per photo pixel of each face; see similarity_transforms."""
    matrices = similarity_transforms(landmarks_xy, alignment)
    return np.asarray(np.hypot(matrices[:, 0, 0], matrices[:, 1, 0]), np.float64)


def align(
    image: NDArray[np.uint8],
    landmarks_xy: NDArray[np.floating],
    alignment: Alignment = STANDARD_ALIGNMENT,
    repeat_edge: bool = False,
) -> NDArray[np.uint8]:
    """Cut the aligned crops of all faces of an image.

    Args:
        image: (H, W, 3) uint8 in any color order.
        landmarks_xy: (n, 5, 2) image pixels.
        alignment: geometry of the crops.
        repeat_edge: fill pixels outside the image from its edge instead of with black.

    Returns:
        (n, size_px, size_px, 3) uint8 crops.
    """
    matrices = similarity_transforms(landmarks_xy, alignment)
    size = (alignment.size_px, alignment.size_px)
    crops = np.empty((len(matrices), *size, 3), np.uint8)
    border = cv2.BORDER_REPLICATE if repeat_edge else cv2.BORDER_CONSTANT
    for matrix, crop in zip(matrices, crops, strict=True):
        cv2.warpAffine(image, matrix, size, dst=crop, flags=cv2.INTER_LINEAR, borderMode=border)
    return crops


def realign_crops(crops_NHWC: NDArray[np.uint8], alignment: Alignment) -> NDArray[np.uint8]:
    """Convert (n, s, s, 3) standard crops of any size to another alignment; missing pixels repeat the edge."""
    source = standard_alignment(crops_NHWC.shape[1])
    if alignment == source:
        return crops_NHWC
    cut = np.empty((len(crops_NHWC), alignment.size_px, alignment.size_px, 3), np.uint8)
    for crop, out in zip(crops_NHWC, cut, strict=True):
        (out[:],) = align(crop, source.template_xy[None], alignment, repeat_edge=True)
    return cut


def rotate_points(points_xy: NDArray[np.float32], turns: int, width: int, height: int) -> NDArray[np.float32]:
    """Rotate (..., 2) points of an image of this size by counterclockwise quarter ``turns``."""
    x, y = points_xy[..., 0], points_xy[..., 1]
    across, down = width - 1 - x, height - 1 - y
    return np.stack([(x, y), (y, across), (across, down), (down, x)][turns % 4], -1)

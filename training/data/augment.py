"""Batch augmentation of aligned crops: a pure function of crops and uniform random numbers.

Each image has a row of uniforms, and each augmentation has its columns. So any rank can augment its slice of the global
batch, and any step can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.vision.alignment import CROP_SIZE_PX, TEMPLATE_XY
from training.config import AugmentConfig
from training.distributed import to_device

# Lengths in pixels are those of crops of 112, and scale with the crop.
# Side in pixels to which crops are shrunk: training must cover both sharp and enlarged photos.
LOW_RESOLUTION_SIDES_PX: Final = (28, 40, 56)
ERASED_SIDE_PX: Final = (12.0, 48.0)
LUMA: Final = (0.299, 0.587, 0.114)
"""Weights of R, G and B (ITU-R BT.601)."""

# Outline of a mask in pixels of the crop, drawn from these ranges. The top stays below the eyes of the template (y =
# 52) and above the mouth (y = 92).
MASK_BRIDGE_Y: Final = (59.0, 70.0)
MASK_CHEEK_DROP: Final = (3.0, 13.0)
"""Distance in pixels between the top edge at the nose and at the cheeks."""
MASK_CHIN_Y: Final = (108.0, 124.0)
MASK_JAW_RISE: Final = (16.0, 26.0)
"""Distance in pixels between the bottom edge at the chin and at the cheeks."""
MASK_HALF_WIDTH: Final = (36.0, 46.0)
MASK_SHADE: Final = 0.5
"""Maximum share of light that the cloth loses toward the cheeks."""


Draw = IntEnum(
    "Draw",
    "MASK MASK_BRIDGE MASK_CHEEK MASK_CHIN MASK_JAW MASK_WIDTH MASK_SHADE MASK_RED MASK_GREEN MASK_BLUE "
    "FLIP MOVE SHIFT_X SHIFT_Y ZOOM ROTATION CONTRAST BRIGHTNESS GRAY LOW_RESOLUTION SIDE "
    "ERASE ERASE_HEIGHT ERASE_WIDTH ERASE_TOP ERASE_LEFT ERASE_RED ERASE_GREEN ERASE_BLUE",
    start=0,
)
"""Column of each uniform random number."""


def draw_uniforms(count: int, seed: int, step: int) -> Tensor:
    """Return (count, len(Draw)) float32 uniforms in [0, 1) for the global batch of one step."""
    # torch.Generator uses only 32 bits of its seed on CPUs, too few for a seed and a step.
    return torch.from_numpy(np.random.default_rng((seed, step)).random((count, len(Draw)), np.float32))


def augment(crops_BCHW: Tensor, u_BK: Tensor, config: AugmentConfig) -> Tensor:
    """Augment a batch: (B, 3, s, s) RGB float32 in [-1, 1] to the same; ``u_BK`` from `draw_uniforms`.

    The order follows the imaging process: mask, pose, light, camera, occlusion. ``u_BK`` is on the CPU, which selects
    the images: a GPU would have to report how many it selected. The host does not wait for a GPU.
    """
    out = crops_BCHW.clone(memory_format=torch.contiguous_format)
    _apply_to_selected(out, u_BK, Draw.MASK, config.mask, _add_mask)
    _apply_to_selected(out, u_BK, Draw.FLIP, config.flip, lambda crops, u: crops.flip(3))
    _apply_to_selected(out, u_BK, Draw.MOVE, config.move, lambda crops, u: _warp(crops, u, config))
    _change_color(out, u_BK, config)
    _apply_to_selected(out, u_BK, Draw.GRAY, config.gray, lambda crops, u: _luma(crops).expand_as(crops))
    _lower_resolution(out, u_BK, config.low_resolution)
    _apply_to_selected(out, u_BK, Draw.ERASE, config.erase, _erase)
    return out


def _apply_to_selected(
    out: Tensor, u_BK: Tensor, column: Draw, probability: float, change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Change in place the images whose uniform in ``column`` is below ``probability``."""
    _change_rows(out, u_BK, u_BK[:, column] < probability, change)


def _change_rows(out: Tensor, u_BK: Tensor, selected_B: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    rows = selected_B.nonzero().flatten()
    if len(rows):
        chosen = to_device(rows, out.device)
        out[chosen] = change(out[chosen], to_device(u_BK[rows], out.device))


def _scale_uniform(u_BK: Tensor, column: Draw, low: float, high: float) -> Tensor:
    """Return (B, 1, 1) numbers in [low, high)."""
    return (low + (high - low) * u_BK[:, column])[:, None, None]


def _pixel_grid(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return (1, s) x and (s, 1) y of pixel centers of (B, 3, s, s) crops."""
    along = torch.arange(like.shape[-1], dtype=like.dtype, device=like.device)
    return along[None, :], along[:, None]


def _enlargement(crops: Tensor) -> float:
    """Return the side of crops in sides of the crops for which lengths are given."""
    return crops.shape[-1] / CROP_SIZE_PX


def _luma(crops: Tensor) -> Tensor:
    return LUMA[0] * crops[:, :1] + LUMA[1] * crops[:, 1:2] + LUMA[2] * crops[:, 2:]


def _add_mask(crops: Tensor, u: Tensor) -> Tensor:
    """Add a cloth mask from the bridge of the nose to below the chin."""
    side = _enlargement(crops)
    x, y = (p / side for p in _pixel_grid(crops))
    half_width = _scale_uniform(u, Draw.MASK_WIDTH, *MASK_HALF_WIDTH)
    across = (x - float(TEMPLATE_XY[:, 0].mean())) / half_width
    bridge, chin = _scale_uniform(u, Draw.MASK_BRIDGE, *MASK_BRIDGE_Y), _scale_uniform(u, Draw.MASK_CHIN, *MASK_CHIN_Y)
    top = bridge + _scale_uniform(u, Draw.MASK_CHEEK, *MASK_CHEEK_DROP) * across.abs()
    bottom = chin - _scale_uniform(u, Draw.MASK_JAW, *MASK_JAW_RISE) * across**2
    # Antialias the edge over one pixel of the crop.
    inside = ((y - top) * side + 0.5).clamp(0, 1) * ((bottom - y) * side + 0.5).clamp(0, 1)
    inside = inside * ((1 - across.abs()) * half_width * side + 0.5).clamp(0, 1)
    light = 1 - _scale_uniform(u, Draw.MASK_SHADE, 0, MASK_SHADE) * across.clamp(-1, 1) ** 2
    cloth = 2 * u[:, Draw.MASK_RED : Draw.MASK_BLUE + 1, None, None] * light[:, None] - 1
    return torch.lerp(crops, cloth.expand_as(crops), inside[:, None])


def _warp(crops: Tensor, u: Tensor, config: AugmentConfig) -> Tensor:
    """Shift, zoom and rotate about the center, to simulate landmark jitter."""
    angle = torch.deg2rad(_scale_uniform(u, Draw.ROTATION, -config.rotation_deg, config.rotation_deg))
    scale = _scale_uniform(u, Draw.ZOOM, 1 - config.zoom, 1 + config.zoom)
    across, along = scale * angle.cos(), scale * angle.sin()
    dx, dy = (2 * _scale_uniform(u, c, -config.shift, config.shift) for c in (Draw.SHIFT_X, Draw.SHIFT_Y))
    x, y = ((2 * p + 1) / crops.shape[-1] - 1 for p in _pixel_grid(crops))  # -1 and 1 are the outer edges of pixels
    # affine_grid rounds differently for other batch sizes, but slices must match the whole batch.
    grid = torch.stack([across * x - along * y + dx, along * x + across * y + dy], -1)
    return F.grid_sample(crops, grid, padding_mode="border", align_corners=False)


def _change_color(out: Tensor, u_BK: Tensor, config: AugmentConfig) -> None:
    """Change contrast about mid-gray and brightness of all images, in place."""
    u_BK = to_device(u_BK, out.device)
    if config.contrast or config.brightness:
        out.mul_(_scale_uniform(u_BK, Draw.CONTRAST, 1 - config.contrast, 1 + config.contrast)[:, None])
        out.add_(_scale_uniform(u_BK, Draw.BRIGHTNESS, -config.brightness, config.brightness)[:, None])
    out.clamp_(-1, 1)


def _lower_resolution(out: Tensor, u_BK: Tensor, probability: float) -> None:
    """Shrink the selected images to one of the low resolutions and enlarge them again, in place."""
    which = (u_BK[:, Draw.SIDE] * len(LOW_RESOLUTION_SIDES_PX)).floor()
    for i, side in enumerate(LOW_RESOLUTION_SIDES_PX):

        def change(crops: Tensor, _u: Tensor, side: int = side) -> Tensor:
            shrunk = round(side * _enlargement(crops))
            small = F.interpolate(crops, size=(shrunk, shrunk), mode="area")
            return F.interpolate(small, size=crops.shape[2:], mode="bilinear", align_corners=False)

        _change_rows(out, u_BK, (u_BK[:, Draw.LOW_RESOLUTION] < probability) & (which == i), change)


def _erase(crops: Tensor, u: Tensor) -> Tensor:
    """Fill a rectangle with one color (Z. Zhong et al., "Random Erasing", AAAI 2020)."""
    x, y = _pixel_grid(crops)
    least, most = (limit * _enlargement(crops) for limit in ERASED_SIDE_PX)
    height, width = (_scale_uniform(u, c, least, most).floor() for c in (Draw.ERASE_HEIGHT, Draw.ERASE_WIDTH))
    top = (u[:, Draw.ERASE_TOP, None, None] * (crops.shape[-1] + 1 - height)).floor()
    left = (u[:, Draw.ERASE_LEFT, None, None] * (crops.shape[-1] + 1 - width)).floor()
    inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
    color = 2 * u[:, Draw.ERASE_RED : Draw.ERASE_BLUE + 1, None, None] - 1
    return torch.where(inside[:, None], color, crops)

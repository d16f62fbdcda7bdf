"""Batch augmentation of aligned crops, as tensors: a pure function of crops and uniform numbers.

Each image owns a row of uniforms and each augmentation its columns of it. Any rank can so vary its slice of the global
batch as one process would, and any step can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, auto
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.alignment import CROP_SIZE_PX, TEMPLATE_XY
from training.config import AugmentConfig

# Most training crops were enlarged from small photos; a sharp probe must not be a new domain, nor a blurred one.
LOW_RESOLUTION_SIDES_PX: Final = (28, 40, 56)
ERASED_SIDE_PX: Final = (12.0, 48.0)
LUMA: Final = (0.299, 0.587, 0.114)
"""Of R, G, B (ITU-R BT.601)."""

# A mask's outline in pixels of the crop; each mask lies somewhere in these ranges. Its top must stay below the eyes of
# the template (y = 52) and above the mouth (y = 92); the chin of most aligned faces is near or below the lower edge.
MASK_BRIDGE_Y: Final = (59.0, 70.0)
MASK_CHEEK_DROP: Final = (3.0, 13.0)
"""How much lower than at the bridge of the nose the top edge is at the cheeks."""
MASK_CHIN_Y: Final = (108.0, 124.0)
MASK_JAW_RISE: Final = (16.0, 26.0)
"""How much higher than at the chin the bottom edge is at the cheeks."""
MASK_HALF_WIDTH: Final = (36.0, 46.0)
MASK_SHADE: Final = 0.5
"""Share of its light that cloth loses, at most, towards the cheeks."""


class Column(IntEnum):
    """What each uniform decides."""

    MASK = 0
    MASK_BRIDGE = auto()
    MASK_CHEEK = auto()
    MASK_CHIN = auto()
    MASK_JAW = auto()
    MASK_WIDTH = auto()
    MASK_SHADE = auto()
    MASK_RED = auto()
    MASK_GREEN = auto()
    MASK_BLUE = auto()
    FLIP = auto()
    MOVE = auto()
    SHIFT_X = auto()
    SHIFT_Y = auto()
    ZOOM = auto()
    ROTATION = auto()
    CONTRAST = auto()
    BRIGHTNESS = auto()
    SATURATION = auto()
    GREY = auto()
    LOW_RESOLUTION = auto()
    SIDE = auto()
    ERASE = auto()
    ERASE_HEIGHT = auto()
    ERASE_WIDTH = auto()
    ERASE_TOP = auto()
    ERASE_LEFT = auto()
    ERASE_RED = auto()
    ERASE_GREEN = auto()
    ERASE_BLUE = auto()
    MORPH = auto()
    MORPH_SHARE = auto()
    MORPH_FIRST = auto()
    """Of the MORPH_GRID numbers that shape the blend."""


MORPH_GRID: Final = 3
MORPH_CONTRAST: Final = 12.0
"""Of the blend's logits: most places show nearly one face alone, with a soft border between the two."""


COLUMNS: Final = len(Column) - 1 + MORPH_GRID**2


def draw(count: int, seed: int, step: int) -> Tensor:
    """(count, COLUMNS) float32 uniforms in [0, 1) for the global batch of one step; a function of its arguments."""
    # Not torch.Generator: on CPUs it uses 32 bits of its seed, too few for a seed and a step.
    return torch.from_numpy(np.random.default_rng((seed, step)).random((count, COLUMNS), np.float32))


def augment(crops_BCHW: Tensor, u_BK: Tensor, config: AugmentConfig) -> Tensor:
    """Vary a batch: (B, 3, 112, 112) RGB float32 in [-1, 1] to the same; ``u_BK`` from :func:`draw`.

    In the order of the world: what is on the face, where it is in the picture, its light, the camera, what hides it.
    """
    u_BK = u_BK.to(crops_BCHW.device)
    out = crops_BCHW.clone(memory_format=torch.contiguous_format)
    _vary(out, u_BK, Column.MASK, config.mask, _masked)
    _vary(out, u_BK, Column.FLIP, config.flip, lambda crops, u: crops.flip(3))
    _vary(out, u_BK, Column.MOVE, config.move, lambda crops, u: _moved(crops, u, config))
    _relight(out, u_BK, config)
    _vary(out, u_BK, Column.GREY, config.grey, lambda crops, u: _luma(crops).expand_as(crops))
    _vary(out, u_BK, Column.LOW_RESOLUTION, config.low_resolution, _blurred)
    _vary(out, u_BK, Column.ERASE, config.erase, _erased)
    return out


def morphed(u_BK: Tensor, config: AugmentConfig) -> Tensor:
    """(B,) bool: which images :func:`morph` blends, and whose labels therefore say nothing."""
    return u_BK[:, Column.MORPH] < config.morph


def morph(crops_BCHW: Tensor, u_BK: Tensor, config: AugmentConfig) -> Tensor:
    """Blend the chosen images with their neighbours in the batch, (0, 1), (2, 3), ..., by smooth random masks.

    Aligned faces blend into faces that nobody has, without end: for a teacher to name, and for no label.
    """
    count = len(crops_BCHW)
    if not config.morph or count < 2:
        return crops_BCHW
    u_BK = u_BK.to(crops_BCHW.device)
    neighbour_B = torch.arange(count, device=crops_BCHW.device) ^ 1
    chosen = (morphed(u_BK, config) & (neighbour_B < count)).nonzero().flatten()
    out = crops_BCHW.clone()
    if len(chosen):
        u = u_BK[chosen]
        shape = u[:, Column.MORPH_FIRST : Column.MORPH_FIRST + MORPH_GRID**2].reshape(-1, 1, MORPH_GRID, MORPH_GRID)
        field = (shape - 0.5 + (u[:, Column.MORPH_SHARE, None, None, None] - 0.5) / 2) * MORPH_CONTRAST
        mask = torch.sigmoid(F.interpolate(field, size=crops_BCHW.shape[2:], mode="bicubic", align_corners=False))
        out[chosen] = torch.lerp(crops_BCHW[chosen], crops_BCHW[neighbour_B[chosen]], mask)
    return out


def _vary(
    out: Tensor, u_BK: Tensor, column: Column, probability: float, change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Change, in place, the images whose number in ``column`` is below ``probability``."""
    chosen = (u_BK[:, column] < probability).nonzero().flatten()
    if len(chosen):
        out[chosen] = change(out[chosen], u_BK[chosen])


def _between(u_BK: Tensor, column: Column, low: float, high: float) -> Tensor:
    """(B, 1, 1) numbers in [low, high)."""
    return (low + (high - low) * u_BK[:, column])[:, None, None]


def _pixel_grid(like: Tensor) -> tuple[Tensor, Tensor]:
    """(1, 112) x and (112, 1) y of pixel centres."""
    along = torch.arange(CROP_SIZE_PX, dtype=like.dtype, device=like.device)
    return along[None, :], along[:, None]


def _luma(crops: Tensor) -> Tensor:
    return LUMA[0] * crops[:, :1] + LUMA[1] * crops[:, 1:2] + LUMA[2] * crops[:, 2:]


def _masked(crops: Tensor, u: Tensor) -> Tensor:
    """Put a cloth mask from the bridge of the nose to below the chin."""
    x, y = _pixel_grid(crops)
    half_width = _between(u, Column.MASK_WIDTH, *MASK_HALF_WIDTH)
    across = (x - float(TEMPLATE_XY[:, 0].mean())) / half_width
    bridge, chin = _between(u, Column.MASK_BRIDGE, *MASK_BRIDGE_Y), _between(u, Column.MASK_CHIN, *MASK_CHIN_Y)
    top = bridge + _between(u, Column.MASK_CHEEK, *MASK_CHEEK_DROP) * across.abs()
    bottom = chin - _between(u, Column.MASK_JAW, *MASK_JAW_RISE) * across**2
    # One pixel wide, so that the edge is not a staircase.
    inside = (y - top + 0.5).clamp(0, 1) * (bottom - y + 0.5).clamp(0, 1)
    inside = inside * ((1 - across.abs()) * half_width + 0.5).clamp(0, 1)
    light = 1 - _between(u, Column.MASK_SHADE, 0, MASK_SHADE) * across.clamp(-1, 1) ** 2
    cloth = 2 * u[:, Column.MASK_RED : Column.MASK_BLUE + 1, None, None] * light[:, None] - 1
    return torch.lerp(crops, cloth.expand_as(crops), inside[:, None])


def _moved(crops: Tensor, u: Tensor, config: AugmentConfig) -> Tensor:
    """Shift, zoom and turn about the centre: a detector's landmarks jitter too."""
    angle = torch.deg2rad(_between(u, Column.ROTATION, -config.rotation_deg, config.rotation_deg))
    scale = _between(u, Column.ZOOM, 1 - config.zoom, 1 + config.zoom)
    across, along = scale * angle.cos(), scale * angle.sin()
    dx, dy = (2 * _between(u, c, -config.shift, config.shift) for c in (Column.SHIFT_X, Column.SHIFT_Y))
    x, y = ((2 * p + 1) / CROP_SIZE_PX - 1 for p in _pixel_grid(crops))  # -1 and 1 are the outer edges of pixels
    # Not affine_grid: its matrix product rounds otherwise for another batch size, and slices must agree.
    grid = torch.stack([across * x - along * y + dx, along * x + across * y + dy], -1)
    return F.grid_sample(crops, grid, padding_mode="border", align_corners=False)


def _relight(out: Tensor, u_BK: Tensor, config: AugmentConfig) -> None:
    """Saturation, contrast about mid-grey and brightness of all images, in place."""
    if config.saturation:
        colour = _between(u_BK, Column.SATURATION, 1 - config.saturation, 1 + config.saturation)
        grey = _luma(out)
        out.sub_(grey).mul_(colour[:, None]).add_(grey)
    if config.contrast or config.brightness:
        out.mul_(_between(u_BK, Column.CONTRAST, 1 - config.contrast, 1 + config.contrast)[:, None])
        out.add_(_between(u_BK, Column.BRIGHTNESS, -config.brightness, config.brightness)[:, None])
    out.clamp_(-1, 1)


def _blurred(crops: Tensor, u: Tensor) -> Tensor:
    """Shrink to one of the low sides and enlarge again."""
    out = torch.empty_like(crops)
    which = (u[:, Column.SIDE] * len(LOW_RESOLUTION_SIDES_PX)).floor()
    for i, side in enumerate(LOW_RESOLUTION_SIDES_PX):
        rows = (which == i).nonzero().flatten()
        if len(rows):
            small = F.interpolate(crops[rows], size=(side, side), mode="area")
            out[rows] = F.interpolate(small, size=crops.shape[2:], mode="bilinear", align_corners=False)
    return out


def _erased(crops: Tensor, u: Tensor) -> Tensor:
    """Fill a rectangle with one colour (Z. Zhong et al., "Random Erasing", AAAI 2020)."""
    x, y = _pixel_grid(crops)
    height, width = (_between(u, c, *ERASED_SIDE_PX).floor() for c in (Column.ERASE_HEIGHT, Column.ERASE_WIDTH))
    top = (u[:, Column.ERASE_TOP, None, None] * (CROP_SIZE_PX + 1 - height)).floor()
    left = (u[:, Column.ERASE_LEFT, None, None] * (CROP_SIZE_PX + 1 - width)).floor()
    inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
    colour = 2 * u[:, Column.ERASE_RED : Column.ERASE_BLUE + 1, None, None] - 1
    return torch.where(inside[:, None], colour, crops)

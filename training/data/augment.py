"""Batch augmentation of aligned crops, as tensors: no worker processes, one generator, reproducible."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Most training crops were enlarged from small photos; a sharp probe must not be a new domain, nor a blurred one.
LOW_RESOLUTION_SIDES_PX = (28, 40, 56)


def augment(crops_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Vary a batch: (B, 3, 112, 112) in [-1, 1] to the same. Drawn from ``generator`` alone."""
    batch = len(crops_BCHW)

    def chance(probability: float) -> Tensor:
        return torch.rand(batch, generator=generator) < probability

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(batch, 1, 1, 1, generator=generator) * (high - low) + low

    out = crops_BCHW.clone()
    flip = chance(0.5)
    out[flip] = out[flip].flip(3)
    out = _shift_and_scale(out, uniform(-0.035, 0.035), uniform(-0.035, 0.035), uniform(0.94, 1.06), chance(0.5))

    low = chance(0.2)
    if low.any():
        side = LOW_RESOLUTION_SIDES_PX[int(torch.randint(len(LOW_RESOLUTION_SIDES_PX), (1,), generator=generator))]
        small = F.interpolate(out[low], size=(side, side), mode="area")
        out[low] = F.interpolate(small, size=out.shape[2:], mode="bilinear", align_corners=False)

    grey = chance(0.1)
    out[grey] = (
        (out[grey] * out.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True).expand(-1, 3, -1, -1)
    )
    out = (out * uniform(0.75, 1.25) + uniform(-0.2, 0.2)).clamp(-1, 1)

    for i in chance(0.15).nonzero().flatten().tolist():
        height, width = (torch.randint(12, 48, (2,), generator=generator)).tolist()
        top = int(torch.randint(0, out.shape[2] - height, (1,), generator=generator))
        left = int(torch.randint(0, out.shape[3] - width, (1,), generator=generator))
        out[i, :, top : top + height, left : left + width] = torch.rand(3, 1, 1, generator=generator) * 2 - 1
    return out


def _shift_and_scale(crops: Tensor, dx: Tensor, dy: Tensor, scale: Tensor, chosen: Tensor) -> Tensor:
    """Resample the chosen crops with a shift (share of the side) and a zoom: a detector's landmarks jitter too."""
    if not chosen.any():
        return crops
    count = int(chosen.sum())
    theta = crops.new_zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = scale[chosen].flatten()
    theta[:, 0, 2], theta[:, 1, 2] = 2 * dx[chosen].flatten(), 2 * dy[chosen].flatten()
    grid = F.affine_grid(theta, list(crops[chosen].shape), align_corners=False)
    crops[chosen] = F.grid_sample(crops[chosen], grid, padding_mode="border", align_corners=False)
    return crops

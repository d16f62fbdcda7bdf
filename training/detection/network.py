"""Face detector of plain 3x3 convolutions, with a top-down feature pyramid and one head for three strides.

The outputs follow SCRFD (J. Guo et al., "Sample and Computation Redistribution for Efficient Face Detection", 2021):
two slots per cell for strides 8, 16, 32; scores after the sigmoid; distances from the cell's point (x * stride, y *
stride) to the four sides and five landmarks, in strides.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STRIDES: Final = (8, 16, 32)
SLOTS: Final = 2
TOWER_DEPTH: Final = 2
# Nominal face size of each slot, sqrt(width * height) in pixels: one octave each.
SLOT_SIZES_PX: Final = ((16.0, 32.0), (64.0, 128.0), (256.0, 512.0))


def conv(channels_in: int, channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
    )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(channels, channels), nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class FaceDetector(nn.Module):
    """Detector from (B, 3, H, W) RGB, (x - 127.5) / 128, H and W multiples of 32, to nine tensors.

    Returns all scores (B, n, 1), then all boxes (B, n, 4) as left, top, right, bottom distances, then all points (B, n,
    10) as x, y pairs. Each group has strides 8, 16, 32 in turn; n = H/stride * W/stride * 2.
    """

    def __init__(self, widths: tuple[int, int, int, int, int] = (16, 32, 48, 64, 64), pyramid: int = 32) -> None:
        super().__init__()
        stem, quarter, *levels = widths
        self.stem = nn.Sequential(conv(3, stem, 2), conv(stem, quarter, 2))
        channels_in = [quarter, *levels[:-1]]
        blocks = (1, 2, 2)
        self.levels = nn.ModuleList(
            nn.Sequential(conv(i, o, 2), *(Residual(o) for _ in range(n)))
            for i, o, n in zip(channels_in, levels, blocks, strict=True)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(c, pyramid, 1) for c in levels)
        self.smooth = nn.ModuleList(conv(pyramid, pyramid) for _ in levels)
        self.tower = nn.ModuleList(nn.Conv2d(pyramid, pyramid, 3, 1, 1, bias=False) for _ in range(TOWER_DEPTH))
        # The strides share kernels but not norms: feature scales differ, and shared statistics would degrade
        # evaluation, landmarks first.
        self.tower_norms = nn.ModuleList(
            nn.ModuleList(nn.BatchNorm2d(pyramid) for _ in range(TOWER_DEPTH)) for _ in STRIDES
        )
        self.score = nn.Conv2d(pyramid, SLOTS, 1)
        self.box = nn.Conv2d(pyramid, SLOTS * 4, 1)
        self.points = nn.Conv2d(pyramid, SLOTS * 10, 1)
        # Prior of 1 % faces, so that the first steps do not only unlearn the background (Lin et al., 2017, section
        # 3.3).
        assert self.score.bias is not None  # noqa: S101 - for the type checker
        nn.init.constant_(self.score.bias, -4.6)

    def predict_raw(self, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return per stride: score logits (B, n, 1), log distances (B, n, 4), point offsets (B, n, 10)."""
        x = self.stem(x)
        features = []
        for level in self.levels:
            x = level(x)
            features.append(x)
        top = None
        merged = []
        for feature, lateral in zip(reversed(features), reversed(self.lateral), strict=True):
            top = lateral(feature) if top is None else lateral(feature) + F.interpolate(top, scale_factor=2.0)
            merged.append(top)
        out = []
        for feature, smooth, norms in zip(reversed(merged), self.smooth, self.tower_norms, strict=True):
            tower = smooth(feature)
            for kernel, norm in zip(self.tower, norms.children(), strict=True):
                tower = F.relu(norm(kernel(tower)))
            out.append(
                (
                    flatten_slots(self.score(tower), 1),
                    flatten_slots(self.box(tower), 4),
                    flatten_slots(self.points(tower), 10),
                )
            )
        return out

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        raw = self.predict_raw(x)
        scores = [torch.sigmoid(s) for s, _, _ in raw]
        # Slots predict in units of their nominal size. Outputs are in strides.
        boxes = [distances(b, sizes) / stride for (_, b, _), stride, sizes in _levels(raw)]
        points = [offsets(p, sizes) / stride for (_, _, p), stride, sizes in _levels(raw)]
        return (*scores, *boxes, *points)


def _levels(
    raw: list[tuple[Tensor, Tensor, Tensor]],
) -> list[tuple[tuple[Tensor, Tensor, Tensor], int, tuple[float, float]]]:
    return list(zip(raw, STRIDES, SLOT_SIZES_PX, strict=True))


def flatten_slots(x: Tensor, values: int) -> Tensor:
    """Reshape (B, SLOTS * values, h, w) to (B, h * w * SLOTS, values)."""
    return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, values)


def _slot_sizes(x: Tensor, sizes: tuple[float, float]) -> Tensor:
    return x.new_tensor(sizes)[None, None, :, None]


def distances(raw_BN4: Tensor, sizes: tuple[float, float]) -> Tensor:
    """Return distances to the sides in pixels: half the slot's size times exp."""
    per_slot = raw_BN4.reshape(raw_BN4.shape[0], -1, SLOTS, 4).clamp(max=3.0)
    return (per_slot.exp() * _slot_sizes(raw_BN4, sizes) / 2).reshape(raw_BN4.shape[0], -1, 4)


def offsets(raw_BN10: Tensor, sizes: tuple[float, float]) -> Tensor:
    """Return offsets of the landmarks from the cell's point, in pixels."""
    per_slot = raw_BN10.reshape(raw_BN10.shape[0], -1, SLOTS, 10)
    return (per_slot * _slot_sizes(raw_BN10, sizes)).reshape(raw_BN10.shape[0], -1, 10)


def cell_points(height_px: int, width_px: int, stride: int, device: torch.device) -> Tensor:
    """Return (n, 2) points in pixels, slots of a cell side by side: SCRFD's anchor centers."""
    ys, xs = torch.meshgrid(
        torch.arange(height_px // stride, device=device), torch.arange(width_px // stride, device=device), indexing="ij"
    )
    return (torch.stack([xs, ys], -1).reshape(-1, 1, 2).expand(-1, SLOTS, 2).reshape(-1, 2) * stride).float()

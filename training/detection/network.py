"""Face detector in the shape of YuNet, wider inside its blocks.

W. Wu et al., "YuNet: A Tiny Millisecond-level Face Detector", Machine Intelligence Research, 2023. The maps between its
blocks have YuNet's channels, so that a student can learn each block on its own. Within a block there are half as many
channels more: with as many as the teacher's, the same number of steps leaves three times the error.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.backbones.bottleneck_net import Mixing, Stem, run_parts

STRIDES: Final = (8, 16, 32)
STEM_WIDTH: Final = 16
WIDTH: Final = 64
INNER_SHARE: Final = 1.5
"""Channels inside a block, as a share of those between blocks."""
COLUMNS: Final = (1, 1, 4, 10)
"""Numbers per cell: class, objectness, box, points."""
SLOTS: Final = 2
"""Rows per cell that SCRFD's readers expect; the second is empty."""
SCORE_SLOPE: Final = 0.43
"""Factor of the scores' logits: 0.90, from which a photo counts as upright by YuNet's scores, becomes SCRFD's 0.72."""

Outputs = list[list[Tensor]]
"""Per stride: class logit (B, 1, h, w), objectness logit (B, 1, h, w), box (B, 4, h, w): center and logarithm of the
sides, points (B, 10, h, w); lengths in strides, from the cell's top left corner."""


def separable(channels_in: int, channels: int) -> nn.Sequential:
    """Return a 1x1 convolution before a depthwise 3x3 one."""
    return nn.Sequential(Mixing(channels_in, channels), nn.Conv2d(channels, channels, 3, padding=1, groups=channels))


def block(channels_in: int, inner: int, channels: int) -> nn.Sequential:
    """Return two separable convolutions with ReLU."""
    return nn.Sequential(separable(channels_in, inner), nn.ReLU(), separable(inner, channels), nn.ReLU())


class Neck(nn.Module):
    """Top-down pyramid and heads, from the maps of the three strides."""

    def __init__(self) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Sequential(separable(WIDTH, WIDTH), nn.ReLU()) for _ in STRIDES)
        self.shared = nn.ModuleList(nn.Sequential(separable(WIDTH, WIDTH), nn.ReLU()) for _ in STRIDES)
        self.heads = nn.ModuleList(nn.ModuleList(separable(WIDTH, columns) for columns in COLUMNS) for _ in STRIDES)

    def forward(self, maps: list[Tensor]) -> Outputs:
        """Return the outputs, of maps (B, 64, h, w) in the order of STRIDES."""
        merged: list[Tensor] = []
        for lateral, features in zip(reversed(self.lateral), reversed(maps), strict=True):
            above = F.interpolate(merged[0], scale_factor=2.0) if merged else 0
            merged.insert(0, lateral(features + above))
        features_of = [shared(x) for shared, x in zip(self.shared, merged, strict=True)]
        return [[head(x) for head in heads.children()] for heads, x in zip(self.heads, features_of, strict=True)]


class FaceDetector(nn.Module):
    """Detector from (B, 3, H, W) RGB, (x - 127.5) / 128, H and W multiples of 32, to SCRFD's nine outputs.

    J. Guo et al., "Sample and Computation Redistribution for Efficient Face Detection", 2021. So InsightFace reads it.
    """

    def __init__(self) -> None:
        super().__init__()
        stem_inner, inner = int(STEM_WIDTH * INNER_SHARE), int(WIDTH * INNER_SHARE)
        self.parts = nn.Sequential(
            Stem(stem_inner, nn.Sequential(nn.ReLU(), separable(stem_inner, STEM_WIDTH), nn.ReLU())),
            nn.Sequential(nn.MaxPool2d(2), *block(STEM_WIDTH, stem_inner, WIDTH)),
            block(WIDTH, inner, WIDTH),
            *(nn.Sequential(nn.MaxPool2d(2), *block(WIDTH, inner, WIDTH)) for _ in STRIDES),
        )
        """Each maps the teacher's map before it to the one after it. The last three have the STRIDES."""
        self.neck = Neck()

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the map after each part, of (B, 3, H, W) RGB in 0..255: black is 0, as at the borders."""
        return run_parts(self.parts, x)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return (B, n, 1) scores in 0..1 of all strides, then (B, n, 4) distances from a cell's corner to left, top,
        right and bottom, then (B, n, 10) points; in strides, n = H/stride * W/stride * SLOTS."""
        levels = self.neck(self.maps(x * 128 + 127.5)[-len(STRIDES) :])
        scores = [_rows(served_score(cls, obj)) for cls, obj, _, _ in levels]
        halves = [(box[:, :2], box[:, 2:].clamp(max=5).exp() / 2) for _, _, box, _ in levels]
        boxes = [_rows(torch.cat([half - center, half + center], 1)) for center, half in halves]
        return (*scores, *boxes, *(_rows(points) for *_, points in levels))


def served_score(cls: Tensor, obj: Tensor) -> Tensor:
    """Return scores in 0..1 from the logits of class and objectness."""
    yunet = (cls.sigmoid() * obj.sigmoid()).sqrt().clamp(1e-6, 1 - 1e-6)
    return torch.sigmoid(SCORE_SLOPE * torch.logit(yunet))


def _rows(x: Tensor) -> Tensor:
    """Reshape (B, columns, h, w) to (B, h * w * SLOTS, columns), zeros in the second slot."""
    cells = x.permute(0, 2, 3, 1).flatten(1, 2)
    return torch.stack([cells, torch.zeros_like(cells)], 2).flatten(1, 2)

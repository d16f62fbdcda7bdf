"""MobileFaceNet: 1 million parameters, 221 million multiply-adds.

S. Chen et al., "MobileFaceNets: Efficient CNNs for Accurate Real-Time Face Verification on Mobile Devices", 2018, Table
1.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from models.vision.alignment import CROP_SIZE_PX
from training.backbones.checkpointing import CheckpointedBlock

WIDTH: Final = 64
# Table 1: expansion t of the block's input, channels c, repetitions n, stride s of the first repetition.
BOTTLENECKS: Final = ((2, 64, 5, 2), (4, 128, 1, 2), (2, 128, 6, 1), (4, 128, 1, 2), (2, 128, 2, 1))


class Bottleneck(CheckpointedBlock):
    """MobileNetV2 block with PReLU: 1x1 expansion, 3x3 depthwise convolution, linear 1x1 projection. (B, channels_in,
    H, W) to (B, channels, H/stride, W/stride). Blocks that keep the shape add their input."""

    def __init__(self, channels_in: int, expanded: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(channels_in, expanded, 1),
            _convolution(expanded, expanded, 3, stride, groups=expanded),
            nn.Conv2d(expanded, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.residual = stride == 1 and channels_in == channels

    def compute(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.residual else out


class MobileFaceNet(nn.Module):
    """MobileFaceNet: (B, 3, crop_px, crop_px) RGB in [-1, 1] to (B, embedding_dim), not normalized. ``width``: factor
    of the channels between the blocks; 1 in the paper, 2 in InsightFace's arcface_torch."""

    def __init__(self, embedding_dim: int = 128, crop_px: int = CROP_SIZE_PX, width: int = 1) -> None:
        super().__init__()
        wide = WIDTH * width
        self.stem = nn.Sequential(_convolution(3, wide, 3, 2), _convolution(wide, wide, 3, groups=WIDTH))
        blocks = []
        channels_in = WIDTH
        for expansion, channels, repetitions, stride in BOTTLENECKS:
            for index in range(repetitions):
                first = stride if index == 0 else 1
                blocks.append(Bottleneck(channels_in * width, expansion * channels_in, channels * width, first))
                channels_in = channels
        self.body = nn.Sequential(*blocks, _convolution(channels_in * width, 512, 1))
        self.head = gdc_head(512, embedding_dim, crop_px)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.stem(x)))
        return out


def gdc_head(channels: int, embedding_dim: int, crop_px: int) -> nn.Sequential:
    """Build the head (B, channels, s, s), s = crop_px / 16, to (B, embedding_dim): global depthwise convolution and
    linear 1x1 convolution. Section 3.1 and Table 1. Unlike average pooling, it learns a weight per map position."""
    map_size = crop_px // 16
    return nn.Sequential(
        nn.Conv2d(channels, channels, map_size, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
        nn.Flatten(),
        nn.Linear(channels, embedding_dim, bias=False),
        nn.BatchNorm1d(embedding_dim),
    )


def _convolution(channels_in: int, channels: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels),
        nn.PReLU(channels),
    )

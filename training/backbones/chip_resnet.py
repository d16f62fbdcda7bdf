"""Residual network for enlarged face chips, with the stages of dlib's face network and narrower late blocks.

D. E. King, dlib, ``anet_type`` of ``dnn_face_recognition_ex.cpp``: a 7x7 stem, five stages of post-activation blocks,
shortcuts by average pooling and zero channels. With equal maps, a student can learn each block of that teacher on its
own.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from torch import Tensor, nn
from torch.nn import functional as F

from models.vision.alignment import CROP_SIZE_PX
from training.backbones.checkpointing import CheckpointedBlock

CHIP_WINDOW_PX: Final = (8, 23, 96)
"""Left, top and side of the chip in a 112x112 crop. Pixels below the crop repeat its edge."""
CHIP_SIDE_PX: Final = 150
STEM_WIDTH: Final = 32
WIDTHS: Final = (32, 64, 128, 256, 256)
"""Channels between blocks, by stage; the stages after the first halve the side."""
INNER_WIDTHS: Final = (32, 64, 128, 160, 160)
"""Channels within blocks. The teacher has 256 in the last two stages, which hold four fifths of its weights."""
DEPTHS: Final = (3, 4, 3, 3, 1)
LAST_BLOCKS: Final = tuple(accumulate(DEPTHS))
"""Indices of the stages' last maps in `ChipResNet.maps`."""


class ChipBlock(CheckpointedBlock):
    """Residual block ReLU(x + BN-Conv-ReLU-BN-Conv(x)): (B, channels_in, H, W) to (B, channels, H // s, W // s)."""

    def __init__(self, channels_in: int, inner: int, channels: int, stride: int) -> None:
        super().__init__()
        # A stride of 2 pads right and bottom only, so that the output aligns with average pooling.
        edges = nn.Identity() if stride == 1 else nn.ZeroPad2d((0, 1, 0, 1))
        self.body = nn.Sequential(
            edges,
            nn.Conv2d(channels_in, inner, 3, stride, 1 if stride == 1 else 0, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.stride = stride
        self.new_channels = channels - channels_in

    def compute(self, x: Tensor) -> Tensor:
        shortcut = x if self.stride == 1 else F.avg_pool2d(x, self.stride)
        if self.new_channels:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(shortcut + self.body(x))


class ChipResNet(nn.Module):
    """Chip ResNet: (B, 3, 112, 112) RGB in [-1, 1] to (B, embedding_dim), not normalized.

    ``stem`` and ``blocks`` have the maps of dlib's network: (B, 32, 35, 35) after the stem, 2x2 after the last block.
    """

    def __init__(self, embedding_dim: int = 128) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, STEM_WIDTH, 7, 2, bias=False),
            nn.BatchNorm2d(STEM_WIDTH),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
        )
        blocks: list[ChipBlock] = []
        channels = STEM_WIDTH
        for width, inner, depth in zip(WIDTHS, INNER_WIDTHS, DEPTHS, strict=True):
            for index in range(depth):
                blocks.append(ChipBlock(channels, inner, width, 2 if index == 0 and blocks else 1))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, embedding_dim, bias=False))

    def cut_chip(self, x: Tensor) -> Tensor:
        """Return (B, 3, 150, 150) chips of 112x112 crops."""
        left, top, side = CHIP_WINDOW_PX
        below = max(0, top + side - CROP_SIZE_PX)
        window = F.pad(x, (0, 0, 0, below), mode="replicate")[:, :, top : top + side, left : left + side]
        return F.interpolate(window, size=(CHIP_SIDE_PX, CHIP_SIDE_PX), mode="bilinear", align_corners=False)

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the maps after the stem and after each block."""
        found = [self.stem(self.cut_chip(x))]
        for block in self.blocks:
            found.append(block(found[-1]))
        return found

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(self.cut_chip(x))))
        return out

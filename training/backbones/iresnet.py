"""IResNet-18, 34, 50, 100 and 200, the improved residual networks of ArcFace.

J. Deng et al., "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", 2019, first version, section 2.2.2
("improved residual unit", option E for the head). D. Han et al., "Deep Pyramidal Residual Networks", 2017, section 3.3,
for the unit. Parameter counts equal those of InsightFace's networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor, nn

from models.vision.alignment import CROP_SIZE_PX
from training.backbones.checkpointing import CheckpointedBlock
from training.backbones.drop_path import DropPath, drop_shares
from training.backbones.mobilefacenet import gdc_head

WIDTHS: Final = (64, 128, 256, 512)
DEPTHS: Final[Mapping[str, tuple[int, int, int, int]]] = {
    "iresnet18": (2, 2, 2, 2),
    "iresnet34": (3, 4, 6, 3),
    "iresnet50": (3, 4, 14, 3),
    "iresnet100": (3, 13, 30, 3),
    "iresnet200": (6, 26, 60, 6),
}


class Block(CheckpointedBlock):
    """Residual block BN-Conv-BN-PReLU-Conv-BN: (B, channels_in, H, W) to (B, channels, H/stride, W/stride).
    ``stride_first``: stride in the first convolution, which is cheaper. The papers' networks stride in the second."""

    def __init__(
        self, channels_in: int, channels: int, stride: int, stride_first: bool = False, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.drop_path = DropPath(drop_path)
        first, second = (stride, 1) if stride_first else (1, stride)
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels_in),
            nn.Conv2d(channels_in, channels, 3, first, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.PReLU(channels),
            nn.Conv2d(channels, channels, 3, second, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels_in == channels
            else nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        )

    def compute(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop_path(self.body(x)) + self.shortcut(x)
        return out


def stages(
    channels_in: int, widths: Sequence[int], depths: Sequence[int], stride_first: bool = False, drop_path: float = 0.0
) -> nn.Sequential:
    """Build stages of blocks. The first block of a stage halves the side and sets the stage's width."""
    blocks: list[Block] = []
    shares = drop_shares(sum(depths), drop_path)
    for width, depth in zip(widths, depths, strict=True):
        for index in range(depth):
            stride = 2 if index == 0 else 1
            blocks.append(Block(channels_in, width, stride, stride_first, shares[len(blocks)]))
            channels_in = width
    return nn.Sequential(*blocks)


class IResNet(nn.Module):
    """IResNet: (B, 3, crop_px, crop_px) RGB in [-1, 1] to (B, embedding_dim), not normalized.

    Args:
        depths: blocks of the stages at 1/2 (56x56 for crops of 112), 1/4, 1/8 and 1/16 of the side.
        dropout: probability in [0, 1) of dropping an activation before the last layer; 0.4 in ArcFace.
        drop_path: probability in [0, 1) of dropping the last block; lower for earlier blocks.
        crop_px: side of the crops, a multiple of 16.
    """

    def __init__(
        self,
        depths: Sequence[int],
        embedding_dim: int = 512,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        crop_px: int = CROP_SIZE_PX,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.PReLU(WIDTHS[0])
        )
        self.body = stages(WIDTHS[0], WIDTHS, depths, drop_path=drop_path)
        map_size = crop_px // 2 ** len(WIDTHS)
        features = nn.BatchNorm1d(embedding_dim)
        # A learned gain could shrink a dimension to zero. A fixed gain of 1 gives each dimension an equal share of the
        # direction.
        features.weight.requires_grad_(False)
        self.head = nn.Sequential(
            nn.BatchNorm2d(WIDTHS[-1]),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(WIDTHS[-1] * map_size**2, embedding_dim),
            features,
        )
        # Initialization of the public networks. Batch norm cancels the size of the weights in the output, but the size
        # sets the effective step, on which published learning rates depend.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.stem(x)))
        return out


class ThinIResNet(nn.Module):
    """Thin IResNet of plain 3x3 convolutions: (B, 3, crop_px, crop_px) RGB in [-1, 1] to (B, embedding_dim), not
    normalized.

    ArcFace's block between a short stem and MobileFaceNet's head. Blocks stride in their first convolution, and only
    the stem runs at half the side: on a CPU, memory traffic of larger maps costs too much.

    Args:
        widths: channels of the stages at 1/4 (28x28 for crops of 112), 1/8 and 1/16 of the side.
        depths: blocks of each stage.
        stem: channels at half the side.
        crop_px: side of the crops, a multiple of 16.
    """

    def __init__(
        self,
        embedding_dim: int = 256,
        widths: Sequence[int] = (48, 96, 192),
        depths: Sequence[int] = (1, 2, 2),
        stem: int = 16,
        crop_px: int = CROP_SIZE_PX,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem), nn.PReLU(stem))
        self.body = stages(stem, widths, depths, stride_first=True)
        self.head = gdc_head(widths[-1], embedding_dim, crop_px)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.stem(x)))
        return out

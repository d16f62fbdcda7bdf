"""A thin improved-residual network of plain 3x3 convolutions, for processors without tensor cores.

The block is ArcFace's (J. Deng et al., 2019, section 2.2.2: BN-Conv-BN-PReLU-Conv-BN), the head MobileFaceNet's global
depthwise convolution (S. Chen et al., 2018, section 3.1). The stride sits in a block's first convolution and nothing
but the stem runs at 56x56: on a CPU such maps cost more in memory traffic than they give.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from models.alignment import CROP_SIZE_PX


class Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels_in),
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.PReLU(channels),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels_in == channels
            else nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


class ThinIResNet(nn.Module):
    """(B, 3, 112, 112) in [-1, 1], RGB, to (B, embedding_dim), not normalised.

    Args:
        widths: channels of the stages at 28x28, 14x14 and 7x7.
        depths: blocks of each stage.
        stem: channels at 56x56.
    """

    def __init__(
        self,
        embedding_dim: int = 256,
        widths: Sequence[int] = (48, 96, 192),
        depths: Sequence[int] = (1, 2, 2),
        stem: int = 16,
    ) -> None:
        super().__init__()
        if len(widths) != 3 or len(depths) != 3 or min(*widths, *depths, stem) < 1:
            raise ValueError("a thin IResNet has three stages, each at least one block of one channel")
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem), nn.PReLU(stem))
        blocks: list[nn.Module] = []
        channels = stem
        for width, depth in zip(widths, depths, strict=True):
            for index in range(depth):
                blocks.append(Block(channels, width, 2 if index == 0 else 1))
                channels = width
        self.body = nn.Sequential(*blocks)
        map_size = CROP_SIZE_PX // 16
        self.head = nn.Sequential(
            nn.Conv2d(channels, channels, map_size, groups=channels, bias=False),
            nn.BatchNorm2d(channels),
            nn.Flatten(),
            nn.Linear(channels, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.stem(x)))
        return out

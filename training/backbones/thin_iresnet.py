"""A thin improved-residual network of plain 3x3 convolutions, for processors without tensor cores.

ArcFace's block between a short stem and MobileFaceNet's head. The stride sits in a block's first convolution and
nothing but the stem runs at 56x56: on a CPU such maps cost more in memory traffic than they give.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from training.backbones.iresnet import stages
from training.backbones.mobilefacenet import gdc_head


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
        self.body = stages(stem, widths, depths, stride_first=True)
        self.head = gdc_head(widths[-1], embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.stem(x)))
        return out

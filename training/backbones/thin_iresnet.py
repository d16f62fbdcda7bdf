"""Thin IResNet of plain 3x3 convolutions, for CPUs.

ArcFace's block between a short stem and MobileFaceNet's head. Blocks stride in their first convolution, and only the
stem runs at 56x56: on a CPU, memory traffic of larger maps costs too much.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from training.backbones.iresnet import stages
from training.backbones.mobilefacenet import gdc_head


class ThinIResNet(nn.Module):
    """Thin IResNet: (B, 3, 112, 112) RGB in [-1, 1] to (B, embedding_dim), not normalized.

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
            raise ValueError("a thin IResNet needs three stages with at least one block and one channel each")
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem), nn.PReLU(stem))
        self.body = stages(stem, widths, depths, stride_first=True)
        self.head = gdc_head(widths[-1], embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.stem(x)))
        return out

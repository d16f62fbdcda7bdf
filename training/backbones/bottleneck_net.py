"""Inverted bottlenecks with squeeze-excitation, in the shape of face-reidentification-retail-0095.

M. Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018; J. Hu et al.,
"Squeeze-and-Excitation Networks", CVPR 2018. The shape is that of the Open Model Zoo's network, without batch norms and
with one slope a PReLU. So a student can learn each block of that teacher on its own.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE_PX: Final = 128
WINDOW_PX: Final = (6, 6, 100)
"""Left, top and side of the teacher's crop in the standard crop of 112 pixels."""
STEM_WIDTH: Final = 64
HEAD_WIDTH: Final = 512
SHAPES: Final = (
    ((64, 128, 64, 2), *[(64, 128, 64, 1)] * 4)
    + ((64, 256, 128, 2), *[(128, 256, 128, 1)] * 6)
    + ((128, 512, 128, 2), *[(128, 256, 128, 1)] * 2)
)
"""Channels before, within and after each bottleneck, and its stride."""
LAST_SIDE: Final = SIDE_PX // 2 // 2**3
"""Side of the last map, in cells."""
SQUEEZE: Final = 8
WHITENING_FLOOR: Final = 1e-4
"""Smallest variance that is enlarged to one, as a share of the largest."""


class Mixing(nn.Module):
    """1x1 convolution whose weights are a matrix (channels_out, channels_in): Muon updates matrices."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels_in) * channels_in**-0.5)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight[:, :, None, None], self.bias)


class Stem(nn.Module):
    """Full 3x3 convolution of (B, 3, H, W) images to ``width`` channels at half the size, and what follows it."""

    whitening: Tensor

    def __init__(self, width: int, rest: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 27) * 27**-0.5)
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("whitening", torch.eye(27))
        self.rest = rest

    @torch.no_grad()
    def whiten(self, images_BCHW: Tensor) -> None:
        """Change the coordinates of the weights to those in which patches of these images have unit covariance.
        Neighboring pixels are almost equal, so without this the descent hardly learns their differences."""
        patches = F.unfold(images_BCHW, 3, stride=7).transpose(1, 2).reshape(-1, 27)
        values, vectors = torch.linalg.eigh(torch.cov(patches.T))
        self.whitening.copy_(vectors @ torch.diag((values + WHITENING_FLOOR * values.max()).rsqrt()) @ vectors.T)

    def forward(self, x: Tensor) -> Tensor:
        kernel = (self.weight @ self.whitening).view(-1, 3, 3, 3)
        out: Tensor = self.rest(F.conv2d(x, kernel, self.bias, stride=2, padding=1))
        return out


def run_parts(parts: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return the map after each part."""
    maps: list[Tensor] = []
    for part in parts:
        x = part(x)
        maps.append(x)
    return maps


class Bottleneck(nn.Module):
    """Bottleneck (B, channels_in, H, W) to (B, channels, H / stride, W / stride), residual where both shapes agree."""

    def __init__(self, channels_in: int, inner: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Mixing(channels_in, inner),
            nn.PReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner),
            nn.PReLU(),
            Mixing(inner, channels),
        )
        self.excitation = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            Mixing(channels, channels // SQUEEZE),
            nn.PReLU(),
            Mixing(channels // SQUEEZE, channels),
            nn.Sigmoid(),
        )
        self.residual = channels_in == channels and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        out = out * self.excitation(out)
        return x + out if self.residual else out


class BottleneckNet(nn.Module):
    """Bottleneck network: (B, 3, 112, 112) RGB in [-1, 1] to (B, embedding_dim), not normalized."""

    def __init__(self, embedding_dim: int = 256) -> None:
        super().__init__()
        head = nn.Sequential(
            Mixing(SHAPES[-1][2], HEAD_WIDTH),
            nn.PReLU(),
            nn.Conv2d(HEAD_WIDTH, HEAD_WIDTH, LAST_SIDE, groups=HEAD_WIDTH),
            Mixing(HEAD_WIDTH, embedding_dim),
            nn.Flatten(),
        )
        depthwise = nn.Conv2d(STEM_WIDTH, STEM_WIDTH, 3, padding=1, groups=STEM_WIDTH)
        stem = Stem(STEM_WIDTH, nn.Sequential(nn.PReLU(), depthwise, nn.PReLU()))
        self.parts = nn.Sequential(stem, *(Bottleneck(*shape) for shape in SHAPES), head)
        """Stem, bottlenecks and head: each maps the teacher's map before it to the one after it."""

    def cut_window(self, x: Tensor) -> Tensor:
        """Return the part of (B, 3, 112, 112) crops that the parts see, in 128x128 pixels."""
        left, top, side = WINDOW_PX
        window = x[:, :, top : top + side, left : left + side]
        return F.interpolate(window, size=(SIDE_PX, SIDE_PX), mode="bilinear", align_corners=False)

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the map after each part; the last one is the embedding."""
        return run_parts(self.parts, self.cut_window(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.maps(x)[-1]

"""Vision transformers for faces: A. Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021.

Sizes of InsightFace's ViT-S and ViT-B: 12x12 patches of 9 pixels, width 512, 8 heads; all tokens enter the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.vision.alignment import CROP_SIZE_PX
from training.backbones.checkpointing import CheckpointedBlock
from training.backbones.drop_path import DropPath, drop_shares

VIT_DEPTHS: Final[Mapping[str, int]] = {"vit_s": 12, "vit_b": 24}
WIDTH: Final = 512
HEADS: Final = 8
PATCH_PX: Final = 9


class TransformerBlock(CheckpointedBlock):
    """Pre-norm attention and MLP with residuals: (B, N, D) to the same."""

    def __init__(self, width: int, heads: int, drop_path: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop_path = DropPath(drop_path)

    def compute(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.drop_path(self.project(mixed))
        out: Tensor = x + self.drop_path(self.mlp(self.before_mlp(x)))
        return out


class VisionTransformer(nn.Module):
    """Vision transformer: (B, 3, crop_px, crop_px) RGB in [-1, 1] to (B, embedding_dim), not normalized."""

    def __init__(
        self,
        depth: int,
        embedding_dim: int = 512,
        drop_path: float = 0.0,
        width: int = WIDTH,
        heads: int = HEADS,
        crop_px: int = CROP_SIZE_PX,
    ) -> None:
        super().__init__()
        tokens = (crop_px // PATCH_PX) ** 2
        self.patches = nn.Conv2d(3, width, PATCH_PX, PATCH_PX)
        self.positions = nn.Parameter(torch.zeros(1, tokens, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, s) for s in drop_shares(depth, drop_path)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(
            nn.Linear(width * tokens, width, bias=False),
            nn.BatchNorm1d(width),
            nn.Linear(width, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim),
        )
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(tokens)).flatten(1))
        return out

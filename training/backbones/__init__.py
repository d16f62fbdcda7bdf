"""Backbones: networks from a crop to an embedding."""

from __future__ import annotations

from torch import nn

from models.vision.alignment import CROP_SIZE_PX
from training.backbones.iresnet import DEPTHS, IResNet, ThinIResNet
from training.backbones.mobilefacenet import MobileFaceNet
from training.backbones.vit import VIT_DEPTHS, VisionTransformer
from training.config import BackboneConfig


def build_backbone(config: BackboneConfig, crop_px: int = CROP_SIZE_PX) -> nn.Module:
    """Build the network of ``config`` with new weights: (B, 3, crop_px, crop_px) in [-1, 1] to (B, embedding_dim)."""
    match config.name:
        case "thin_iresnet":
            return ThinIResNet(config.embedding_dim, config.widths, config.depths, config.stem, crop_px)
        case "iresnet18" | "iresnet34" | "iresnet50" | "iresnet100" | "iresnet200":
            return IResNet(DEPTHS[config.name], config.embedding_dim, config.dropout, config.drop_path, crop_px)
        case "vit_s" | "vit_b":
            return VisionTransformer(VIT_DEPTHS[config.name], config.embedding_dim, config.drop_path, crop_px=crop_px)
        case "mobilefacenet":
            return MobileFaceNet(config.embedding_dim, crop_px, config.width)

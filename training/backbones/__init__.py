"""Networks from a 112x112 crop to an embedding."""

from training.backbones.thin_iresnet import ThinIResNet

__all__ = ["ThinIResNet"]

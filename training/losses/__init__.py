"""Classification heads over cosine logits."""

from training.losses.adacos import AdaCos
from training.losses.core import CosineHead
from training.losses.margins import ArcFace, CosFace, NormFace

__all__ = ["AdaCos", "ArcFace", "CosFace", "CosineHead", "NormFace"]

"""Networks as heavy as those that are deployed, for speed alone: IResNet-50 with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

DIMENSION: Final = 512
SETTLING: Final = 20
"""Batches that batch normalisation sees."""


def heavy_pack(detector: Path, cache: Path) -> Path:
    """A directory with a copy of ``detector`` and the recogniser."""
    directory = heavy_recogniser(cache).parent
    shutil.copy(detector, directory / "detector.onnx")
    return directory


def heavy_recogniser(cache: Path) -> Path:
    """Made once."""
    recogniser = cache / "heavy" / "recognizer.onnx"
    if not recogniser.is_file():
        import torch

        from training.backbones import build_backbone
        from training.config import BackboneConfig

        recogniser.parent.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        network = build_backbone(BackboneConfig(name="iresnet50", embedding_dim=DIMENSION))
        # Untrained, each block's numbers are larger than the last one's, out of fp16's range in the end.
        with torch.no_grad():
            for _ in range(SETTLING):
                network(2 * torch.rand(8, 3, 112, 112) - 1)
        network.eval()
        unfinished = recogniser.with_suffix(".unfinished")
        torch.onnx.export(
            network,
            (torch.rand(2, 3, 112, 112),),
            unfinished,
            input_names=["input"],
            output_names=["embedding"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=False,
        )
        unfinished.rename(recogniser)
    return recogniser

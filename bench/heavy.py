"""Networks as heavy as those in production, for speed alone: IResNet-50 with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

DIMENSION: Final = 512
SETTLING: Final = 20
"""Batches that set the statistics of batch normalization."""


def heavy_pack(detector: Path, cache: Path) -> Path:
    """Return a directory with a copy of ``detector`` and the recognizer, which is created once."""
    recognizer = cache / "heavy" / "recognizer.onnx"
    if not recognizer.is_file():
        import torch

        from training.backbones import build_backbone
        from training.config import BackboneConfig

        recognizer.parent.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        network = build_backbone(BackboneConfig(name="iresnet50", embedding_dim=DIMENSION))
        # Without training, the activations grow from block to block and leave the range of fp16.
        with torch.no_grad():
            for _ in range(SETTLING):
                network(2 * torch.rand(8, 3, 112, 112) - 1)
        network.eval()
        unfinished = recognizer.with_suffix(".unfinished")
        torch.onnx.export(
            network,
            (torch.rand(2, 3, 112, 112),),
            unfinished,
            input_names=["input"],
            output_names=["embedding"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=False,
        )
        unfinished.rename(recognizer)
    shutil.copy(detector, recognizer.with_name("detector.onnx"))
    return recognizer.parent

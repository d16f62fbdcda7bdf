"""ONNX export of trained networks, checked against torch on real images."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from models.runtime.onnx_files import finalize_onnx
from models.runtime.onnx_runtime import OnnxNetwork
from training.detection.network import STRIDES, FaceDetector
from training.errors import ParityError

OPSET = 18
MIN_COSINE_FP32 = 0.9999
MIN_COSINE_FP16 = 0.999
MAX_BOX_SHIFT_STRIDES = 0.05
MAX_SCORE_SHIFT = 0.001
MIN_CHECKED_SCORE = 0.3
"""Scores of a detector below this are far from any threshold."""
ExportPrecision = Literal["fp32", "fp16"]


class Centered(nn.Module):
    """Network with a constant (D,) subtracted from its embeddings.

    If all faces share a large part of their embedding, cosines discriminate better without it.
    """

    def __init__(self, network: nn.Module, offset_D: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("offset", offset_D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x) - self.offset
        return out


def export_recognizer(
    backbone: nn.Module,
    crops_BCHW: Tensor,
    path: Path,
    metadata: dict[str, str],
    precision: ExportPrecision = "fp16",
) -> float:
    """Write ``backbone`` as ONNX, with weights in fp32 or fp16; return the worst cosine to torch.

    Args:
        crops_BCHW: at least a dozen real crops in [-1, 1].

    Raises:
        ParityError: the worst cosine is below 0.9999 in fp32, or 0.999 in fp16.
    """
    backbone = backbone.eval().cpu().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    with torch.no_grad():
        expected = backbone(crops_BCHW).numpy()
    with _drafts(path) as (exact, stored):
        _export(backbone, crops_BCHW[:2], exact, ["embedding"], ({0: Dim("batch", min=1, max=4096)},))
        worst = _check_cosine(expected, OnnxNetwork(exact).run(crops_BCHW.numpy())[0], MIN_COSINE_FP32, "fp32")
        finalize_onnx(exact, stored, metadata, fp16_weights=precision == "fp16")
        if precision == "fp16":
            worst = _check_cosine(expected, OnnxNetwork(stored).run(crops_BCHW.numpy())[0], MIN_COSINE_FP16, "fp16")
        stored.replace(path)
        return worst


def export_detector(model: FaceDetector, photos_BCHW: Tensor, path: Path, metadata: dict[str, str]) -> float:
    """Write the detector as ONNX with fp16 weights.

    Returns:
        Largest shift of a confident box or landmark, in strides.

    Raises:
        ParityError: a score moves by more than 0.02 or a confident box by more than 0.05 strides.
    """
    model = model.eval().cpu().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    with torch.no_grad():
        expected = [t.numpy() for t in model(photos_BCHW)]
    names = [f"{kind}_{stride}" for kind in ("score", "box", "points") for stride in STRIDES]
    height, width = Dim("h", min=2, max=128), Dim("w", min=2, max=128)
    with _drafts(path) as (exact, stored):
        # Unequal sides, so that the exporter does not assume squares.
        example = torch.zeros(2, 3, 256, 320)
        _export(model, example, exact, names, ({0: Dim("batch", min=1, max=512), 2: 32 * height, 3: 32 * width},))
        finalize_onnx(exact, stored, metadata)
        shift = _check_detections(expected, OnnxNetwork(stored).run(photos_BCHW.numpy()))
        stored.replace(path)
        return shift


@contextmanager
def _drafts(path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield two paths beside a file for unchecked files, which are removed unless they are moved."""
    with TemporaryDirectory(dir=path.parent) as folder:
        yield Path(folder) / "exact.onnx", Path(folder) / "stored.onnx"


def _export(model: nn.Module, example: Tensor, path: Path, outputs: Sequence[str], shapes: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The exporter logs that torchvision is missing, which is not used here.
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(
            model,
            (example,),
            str(path),
            input_names=["input"],
            output_names=list(outputs),
            dynamo=True,
            dynamic_shapes=shapes,
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )


def _check_cosine(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any], minimum: float, name: str) -> float:
    products = (expected * actual).sum(1)
    cosines = products / (np.linalg.norm(expected, axis=1) * np.linalg.norm(actual, axis=1))
    worst = float(cosines.min())
    if not worst >= minimum:
        raise ParityError(f"{name}: crop {int(cosines.argmin())} has cosine {worst:.6f} to torch, below {minimum}")
    return worst


def _check_detections(expected: Sequence[np.ndarray[Any, Any]], actual: Sequence[np.ndarray[Any, Any]]) -> float:
    worst = 0.0
    levels = len(STRIDES)
    for i, stride in enumerate(STRIDES):
        near = ~(np.maximum(expected[i], actual[i]) < MIN_CHECKED_SCORE)  # NaN is checked
        moved = float(np.abs(expected[i] - actual[i])[near].max(initial=0))
        if not moved <= 0.02:
            raise ParityError(f"stride {stride}: a score moves by {moved:.4f}; the limit is 0.02")
        confident = expected[i][..., 0] > 0.5
        for kind in (levels, 2 * levels):
            if confident.any():
                worst = float(np.maximum(worst, np.abs(expected[i + kind] - actual[i + kind])[confident].max()))
    if not worst <= MAX_BOX_SHIFT_STRIDES:
        raise ParityError(
            f"a confident box or landmark moves by {worst:.4f} strides; the limit is {MAX_BOX_SHIFT_STRIDES}"
        )
    return worst

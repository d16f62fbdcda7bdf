"""ONNX export of trained networks, checked against torch on real images."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from models.runtime.onnx_files import finalize_onnx
from models.runtime.onnx_runtime import OnnxNetwork
from training.errors import ParityError

OPSET = 18
MIN_COSINE_FP32 = 0.9999
MIN_COSINE_FP16 = 0.999
ExportPrecision = Literal["fp32", "fp16"]


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
    with TemporaryDirectory(dir=path.parent) as drafts:
        exact, stored = Path(drafts) / "exact.onnx", Path(drafts) / "stored.onnx"
        _export(backbone, crops_BCHW[:2], exact)
        worst = _check_cosine(expected, OnnxNetwork(exact).run(crops_BCHW.numpy())[0], MIN_COSINE_FP32, "fp32")
        finalize_onnx(exact, stored, metadata, fp16_weights=precision == "fp16")
        if precision == "fp16":
            worst = _check_cosine(expected, OnnxNetwork(stored).run(crops_BCHW.numpy())[0], MIN_COSINE_FP16, "fp16")
        stored.replace(path)
        return worst


def _export(model: nn.Module, example: Tensor, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The exporter logs that torchvision is missing, which is not used here.
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(
            model,
            (example,),
            str(path),
            input_names=["input"],
            output_names=["embedding"],
            dynamo=True,
            dynamic_shapes=({0: Dim("batch", min=1, max=4096)},),
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

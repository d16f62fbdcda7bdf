"""Conversion of networks to half precision, with a cache on disk."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from models.checksums import sha256_of
from models.errors import RuntimeUnavailableError
from models.runtime.onnx_runtime import import_onnxruntime, runtime_version

if TYPE_CHECKING:
    import onnx


def convert_to_fp16(path: Path, folder: Path) -> Path:
    """Return the network with weights and arithmetic in fp16, and inputs and outputs in fp32.

    The result is cached in ``folder`` by checksum and onnxruntime version.

    Raises:
        RuntimeUnavailableError: onnxruntime cannot open the file.
    """
    import onnx  # slow to import, and needed only for the first conversion

    cached = folder / f"{sha256_of(path)[:16]}-fp16-{runtime_version()}.onnx"
    if not cached.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work) / "half.onnx"
            onnx.save(_convert(_fold_constants(path, Path(work))), made)
            # Concurrent conversions replace each other with equal files.
            os.replace(made, cached)  # noqa: PTH105
    return cached


def _fold_constants(path: Path, folder: Path) -> onnx.ModelProto:
    """Fold the casts of fp16 weights, which the converter would keep."""
    import onnx

    runtime = import_onnxruntime()
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "folded.onnx")
    options.log_severity_level = 3
    try:
        runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a dozen unrelated types here
        raise RuntimeUnavailableError(f"{path.name} cannot be opened: {error}") from error
    return onnx.load(folder / "folded.onnx")


def _convert(network: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with warnings.catch_warnings():
        # The converter warns about every underflow. CudaNetwork compares the result with fp32.
        warnings.simplefilter("ignore")
        converted: onnx.ModelProto = convert_float_to_float16(network, keep_io_types=True)
    return converted

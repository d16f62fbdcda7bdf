"""A network's file in half precision, made once and kept."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import RuntimeUnavailableError
from models.runtime import library, runtime_version

if TYPE_CHECKING:
    import onnx


def half_precision(path: Path, folder: Path) -> Path:
    """``path``'s network with weights and arithmetic in fp16; inputs and outputs stay fp32. Kept in ``folder`` by the
    file's checksum and the converter's version.

    Raises:
        RuntimeUnavailableError: the file is no network, or cannot be converted.
    """
    import onnx  # slow to import, and only wanted once

    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    kept = folder / f"{digest[:16]}-fp16-{runtime_version()}.onnx"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as workshop:
            made = Path(workshop) / "half.onnx"
            onnx.save(_convert(_folded(path, Path(workshop))), made)
            # Another process may be making the same file: whichever is last replaces its equal.
            os.replace(made, kept)  # noqa: PTH105
    return kept


def _folded(path: Path, folder: Path) -> onnx.ModelProto:
    """With constants computed: packs keep their weights in fp16 behind casts, which the converter leaves."""
    import onnx

    runtime = library()
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
        # One for every weight below fp16's smallest: what comes out is compared with fp32 before it serves.
        warnings.simplefilter("ignore")
        converted: onnx.ModelProto = convert_float_to_float16(network, keep_io_types=True)
    return converted

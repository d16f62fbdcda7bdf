"""Static INT8 by onnxruntime's quantiser: the only other place that knows onnxruntime."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

BATCH = 32


class _Crops(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, crops_BCHW: NDArray[np.float32]) -> None:
        self._batches: Iterator[NDArray[np.float32]] = iter(np.split(crops_BCHW, range(BATCH, len(crops_BCHW), BATCH)))

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"input": batch}


def quantise(source: Path, target: Path, crops_BCHW: NDArray[np.float32]) -> None:
    """Write ``source`` with 8-bit weights (per channel) and activations; ``crops_BCHW`` set the activations' ranges."""
    # The quantiser speaks through the root logger at every call.
    before = logging.root.level
    logging.root.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            prepared = Path(folder) / "prepared.onnx"
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            quantize_static(
                str(prepared),
                str(target),
                _Crops(crops_BCHW),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
    finally:
        logging.root.setLevel(before)

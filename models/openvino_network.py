"""The only place that knows OpenVINO: one compiled network per shape, in the numbers asked for, without telemetry."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.errors import RuntimeUnavailableError
from models.network import Engine, Float, Precision
from models.runtime import available_cores

BATCHES: Final = (1, 8)
MAX_COMPILED: Final = 16
HINTS: Final[dict[Precision, str]] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
CAPABILITIES: Final[dict[str, Precision]] = {"FP32": "fp32", "BF16": "bf16", "FP16": "fp16", "INT8": "int8"}

PASSIVE: Final = frozenset({"Input", "Output", "Const", "Reorder", "Reshape"})
"""Kinds of nodes that only hand on what others computed."""


def is_installed() -> bool:
    return find_spec("openvino") is not None


def _openvino() -> Any:
    """Imported here: it costs memory that a process whose networks run elsewhere need not spend."""
    # Its converter reports each import to Google and writes two files under the home directory, which a face service
    # must not; nothing here converts.
    sys.modules.setdefault("openvino.tools.ovc", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError as error:
        raise RuntimeUnavailableError(
            "openvino is not installed: install the distribution with its 'cpu' extra"
        ) from error
    return openvino


def openvino_version() -> str:
    """Raises RuntimeUnavailableError."""
    return str(_openvino().__version__).split("-")[0]


def fast_precisions() -> frozenset[Precision]:
    """The numbers that this processor multiplies faster than fp32, and fp32. Raises RuntimeUnavailableError."""
    named = _openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return frozenset(CAPABILITIES[name] for name in named if name in CAPABILITIES)


class OpenVinoNetwork:
    """One ONNX network on the CPU, compiled for each shape it meets.

    A network of fixed shape runs twice as fast as one of open shape where it is small. So batches are cut into those of
    ``BATCHES``, nothing is filled up, and shapes used least lately make room.

    Args:
        path: INT8 is the file's own, as QDQ.
        precision: what the rest is computed in; of INT8's rest, bf16 where the processor
            multiplies it, else fp32.

    Raises:
        RuntimeUnavailableError: OpenVINO is not installed, or cannot read the file.
    """

    engine: Engine = "openvino"

    def __init__(self, path: Path, precision: Precision = "fp32", threads: int | None = None) -> None:
        self.path = path
        self.precision = precision
        self.why = ""
        self._core = _openvino().Core()
        rest: Precision = precision
        if precision == "int8":
            rest = "bf16" if "bf16" in fast_precisions() else "fp32"
        self._options = {
            "INFERENCE_PRECISION_HINT": HINTS[rest],
            "INFERENCE_NUM_THREADS": threads or available_cores(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        try:
            model = self._core.read_model(path)
        except Exception as error:  # OpenVINO raises RuntimeError and its own kinds
            raise RuntimeUnavailableError(f"{path.name} cannot be opened by OpenVINO: {error}") from error
        self._model = model
        self.input_shape: tuple[int | str | None, ...] = tuple(
            d.get_length() if d.is_static else None for d in model.inputs[0].partial_shape
        )
        self.output_names: list[str] = [output.get_any_name() for output in model.outputs]
        # SCRFD exports for one photo have outputs without a batch axis, (n, k) instead of (batch, n, k).
        ranks = [output.partial_shape.rank.get_length() for output in model.outputs]
        fixed = 1 if len(ranks) > 1 and min(ranks) < 3 else self.input_shape[0]
        self._batches = (fixed,) if isinstance(fixed, int) else BATCHES
        self._requests: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    @property
    def providers(self) -> list[str]:
        return ["OpenVINO CPU"]

    def run(self, batch: Float) -> list[Float]:
        """Run ``batch`` (n, ...) and return every output with its rows in order: n of them, or where a network has no
        batch axis in its outputs, those of each input one after the other."""
        pieces: list[list[Float]] = []
        start = 0
        while start < len(batch):
            left = len(batch) - start
            size = max((b for b in self._batches if b <= left), default=self._batches[0])
            piece = np.ascontiguousarray(batch[start : start + size], np.float32)
            if (missing := size - len(piece)) > 0:  # only where the file itself fixes the batch
                piece = np.concatenate([piece, np.zeros((missing, *piece.shape[1:]), np.float32)])
            request = self._request(piece.shape)
            request.infer([piece], share_inputs=True)
            # Copied: the next run writes over them.
            pieces.append([np.array(request.get_output_tensor(i).data) for i in range(len(self.output_names))])
            if missing > 0:
                pieces[-1] = [output[:-missing] for output in pieces[-1]]
            start += size
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)]

    def placement(self, batch: Float) -> dict[str, int]:
        """How many nodes of the network compiled for ``batch`` are computed in which numbers."""
        self.run(batch)
        compiled = self._request((self._batches[0], *batch.shape[1:])).get_compiled_model()
        computing = [
            node.get_rt_info()["runtimePrecision"].astype(str)
            for node in compiled.get_runtime_model().get_ordered_ops()
            if node.get_rt_info()["layerType"].astype(str) not in PASSIVE
        ]
        return {f"OpenVINO {numbers}": count for numbers, count in Counter(computing).items()}

    def _request(self, shape: tuple[int, ...]) -> Any:
        """Ready to run this shape."""
        if shape in self._requests:
            self._requests.move_to_end(shape)
            return self._requests[shape]
        try:
            self._model.reshape(list(shape))
            request = self._core.compile_model(self._model, "CPU", self._options).create_infer_request()
        except Exception as error:
            raise RuntimeUnavailableError(f"OpenVINO cannot run {self.path.name} on {shape}: {error}") from error
        self._requests[shape] = request
        if len(self._requests) > MAX_COMPILED:
            self._requests.popitem(last=False)
        return request

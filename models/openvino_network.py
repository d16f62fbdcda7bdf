"""The only place that knows OpenVINO: networks compiled by shape, in the numbers asked for, without telemetry."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.errors import RuntimeUnavailableError
from models.network import Engine, Float, Precision
from models.onnx_check import check_network
from models.runtime import available_cores, cut, filled, has_fast_int8

BATCHES: Final = (1, 4)
"""Larger ones gain nothing on a processor, and each costs the memory of a network of its own."""
LARGEST_BATCHED: Final = 256 * 256
"""Pixels of an input beyond which one alone keeps a processor busy."""
LARGE_FILE: Final = 16_000_000
"""Bytes from which on a network spends its time in multiplying: open in batch and sides it is about as fast, and
one for each shape would cost hundreds of megabytes."""
OPEN_BATCH: Final = 8
MAX_COMPILED: Final = 24
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
    known = frozenset(CAPABILITIES[name] for name in named if name in CAPABILITIES)
    # It names INT8 on every processor, for it runs there too.
    return known if has_fast_int8() else known - {"int8"}


class OpenVinoNetwork:
    """One ONNX network on the CPU, compiled for the shapes it meets, when it meets them.

    A small network of fixed shape runs up to twice as fast as one of open shape. So batches are cut into those of
    ``BATCHES``, nothing is filled up, and shapes used least lately make room. A large one is compiled once, for all.

    Args:
        path: INT8 is the file's own, as QDQ.
        precision: what the rest is computed in; of INT8's rest, bf16 where the processor
            multiplies it, else fp32.

    Raises:
        PackError: the file holds what is not opened (models.onnx_check).
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
        check_network(path)
        try:
            self._model = self._core.read_model(path)
        except Exception as error:  # OpenVINO raises RuntimeError and its own kinds
            raise RuntimeUnavailableError(f"{path.name} cannot be opened by OpenVINO: {error}") from error
        self.input_shape: tuple[int | str | None, ...] = tuple(
            d.get_length() if d.is_static else None for d in self._model.inputs[0].partial_shape
        )
        self.output_names: list[str] = [output.get_any_name() for output in self._model.outputs]
        # SCRFD exports for one photo have outputs without a batch axis, (n, k) instead of (batch, n, k).
        ranks = [output.partial_shape.rank.get_length() for output in self._model.outputs]
        fixed = 1 if len(ranks) > 1 and min(ranks) < 3 else self.input_shape[0]
        self._fixed = fixed if isinstance(fixed, int) else None
        self._is_large = path.stat().st_size >= LARGE_FILE
        self._requests: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    @property
    def providers(self) -> list[str]:
        return ["OpenVINO CPU"]

    def run(self, batch: Float) -> list[Float]:
        """Run ``batch`` (n, ...) and return every output with its rows in order: n of them, or where a network has no
        batch axis in its outputs, those of each input one after the other."""
        pieces = []
        for rows in cut(len(batch), self._sizes(batch.shape)):
            # OpenVINO takes an array as it lies only where it may write to it.
            piece = np.require(filled(batch[rows], self._fixed or len(batch[rows])), np.float32, ["C", "W"])
            request = self._request(piece.shape)
            # Its own infer() takes inputs apart and outputs together again in Python, at 0.06 ms.
            request.set_input_tensor(_openvino().Tensor(piece, shared_memory=True))
            request.start_async()
            request.wait()
            # Copied: the next run writes over them.
            outputs = [np.array(request.get_output_tensor(i).data) for i in range(len(self.output_names))]
            pieces.append([o[: len(batch[rows])] for o in outputs] if len(piece) > len(batch[rows]) else outputs)
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)]

    def placement(self, batch: Float) -> dict[str, int]:
        """Run ``batch`` once; return how many nodes of the network were computed in which numbers."""
        self.run(batch)
        compiled = self._requests[next(reversed(self._requests))].get_compiled_model()
        known = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
        numbers = [
            info["runtimePrecision"].astype(str) for info in known if info["layerType"].astype(str) not in PASSIVE
        ]
        return {f"OpenVINO {kind}": count for kind, count in Counter(numbers).items()}

    def operators_ms(self, batch: Float) -> dict[str, float]:
        """Milliseconds of one run of ``batch`` by operator, as OpenVINO's own counters have them."""
        self._model.reshape(list(batch.shape))
        options = self._options | {"PERF_COUNT": True}
        request = self._core.compile_model(self._model, "CPU", options).create_infer_request()
        for _ in range(2):
            request.infer([np.require(batch, np.float32, ["C", "W"])])
        taken: dict[str, float] = {}
        for node in request.get_profiling_info():
            taken[node.node_type] = taken.get(node.node_type, 0.0) + node.real_time.total_seconds() * 1000
        return taken

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self._fixed is not None:
            return (self._fixed,)
        if self._is_large:
            return tuple(range(1, OPEN_BATCH + 1))
        return BATCHES if shape[-2] * shape[-1] <= LARGEST_BATCHED else BATCHES[:1]

    def _request(self, shape: tuple[int, ...]) -> Any:
        """Ready to run this shape."""
        if self._is_large:
            shape = (self._fixed or -1, *(side if isinstance(side, int) else -1 for side in self.input_shape[1:]))
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

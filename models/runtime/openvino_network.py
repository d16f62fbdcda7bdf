"""OpenVINO: networks compiled by input shape and precision, without telemetry."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.errors import PackError, RuntimeUnavailableError, summarize
from models.runtime.network import Engine, Float, Precision, input_type, is_ir, weights_file
from models.runtime.onnx_check import check_network
from models.runtime.onnx_runtime import available_cores, has_fast_int8, run_in_pieces

BATCH_SIZES: Final = (1, 4)
"""Larger batches are no faster on a CPU, and on a share of it none are. Each size takes memory."""
MAX_SMALL_PX: Final = 256 * 256
"""Largest input that gains from batches, or from a share of the cores; larger ones use all cores alone."""
LARGE_FILE_BYTES: Final = 16_000_000
"""Size of a file from which a network is compiled once, with dynamic shapes, and has all cores for one run.

Large networks are about as fast with dynamic shapes, and one compilation per shape would take hundreds of megabytes.
"""
MAX_DYNAMIC_BATCH: Final = 8
PRECISION_HINTS: Final[dict[Precision, str]] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
CAPABILITIES: Final[dict[str, Precision]] = {"FP32": "fp32", "BF16": "bf16", "FP16": "fp16", "INT8": "int8"}
TIMED_CHANNELS: Final = 128
TIMED_SIDE: Final = 28
TIMED_LAYERS: Final = 6
TIMED_RUNS: Final = 10
_LOCK: Final = threading.Lock()
DATA_LAYERS: Final = frozenset({"Input", "Output", "Const", "Reorder", "Reshape"})
"""Layer types that only move data."""


def _import_openvino() -> Any:
    """Import OpenVINO on demand, since it takes memory."""
    # The model converter sends telemetry at import and writes files to the home directory. It is not needed here.
    sys.modules.setdefault("openvino.tools.ovc", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError as error:
        raise RuntimeUnavailableError(
            "openvino is not installed: install the distribution with its 'cpu' extra"
        ) from error
    return openvino


@lru_cache(maxsize=1)
def _single_core() -> Any:
    return _import_openvino().Core()


def _core() -> Any:
    """Return the process's only Core, which stays until its end.

    Each Core replaces the signal stack of the thread that first uses it, and puts back the former one when it goes. If
    Cores go in the order in which they came, the last one puts back a stack that was freed, and the next signal ends
    the process.
    """
    with _LOCK:
        return _single_core()


def openvino_version() -> str:
    """Return the version of OpenVINO. Raises RuntimeUnavailableError."""
    return str(_import_openvino().__version__).split("-")[0]


def supported_precisions() -> frozenset[Precision]:
    """Return the precisions that OpenVINO computes in here, fast or not. Raises RuntimeUnavailableError."""
    capabilities = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return frozenset(CAPABILITIES[name] for name in capabilities if name in CAPABILITIES)


def fast_precisions() -> frozenset[Precision]:
    """Return fp32 and the precisions that this processor runs faster. Raises RuntimeUnavailableError."""
    supported = supported_precisions()
    # OpenVINO reports INT8 on every processor, and bf16 on those that need longer for it.
    slow = {"int8"} if not has_fast_int8() else set[Precision]()
    if "bf16" in supported and not has_fast_bf16():
        slow.add("bf16")
    return supported - slow


@lru_cache(maxsize=1)
def has_fast_bf16() -> bool:
    """Time a few convolutions in fp32 and bf16, which takes 0.1 s, and tell whether bf16 is faster.

    No flag tells: of processors with AVX512_BF16, Intel's without AMX need 1.7 times longer for bf16 than for fp32.
    """
    model, pixels = _convolutions()
    requests = []
    for precision in ("fp32", "bf16"):
        options = {"INFERENCE_PRECISION_HINT": PRECISION_HINTS[precision], "INFERENCE_NUM_THREADS": 1}
        requests.append(_core().compile_model(model, "CPU", options).create_infer_request())
        requests[-1].get_input_tensor().data[:] = pixels
    seconds: list[list[float]] = [[], []]
    for _ in range(TIMED_RUNS):
        for request, taken in zip(requests, seconds, strict=True):
            started = time.perf_counter()
            request.infer()
            taken.append(time.perf_counter() - started)
    exact, rounded = (min(taken) for taken in seconds)
    return rounded < exact


def _convolutions() -> tuple[Any, Float]:
    """Return a model of pointwise convolutions, as recognizers have most of, and its input."""
    openvino = _import_openvino()
    ops, rng = openvino.opset13, np.random.default_rng(0)
    shape = (1, TIMED_CHANNELS, TIMED_SIDE, TIMED_SIDE)
    given = ops.parameter(shape, np.float32)
    maps = given
    for _ in range(TIMED_LAYERS):
        kernel = rng.normal(0, TIMED_CHANNELS**-0.5, (TIMED_CHANNELS, TIMED_CHANNELS, 1, 1)).astype(np.float32)
        maps = ops.relu(ops.convolution(maps, ops.constant(kernel), [1, 1], [0, 0], [0, 0], [1, 1]))
    return openvino.Model([maps], [given]), rng.random(shape, np.float32)


@dataclass(frozen=True)
class _Compiled:
    """Network compiled for one shape, and its requests that do not run now."""

    network: Any
    idle: list[Any] = field(default_factory=list)

    def take(self) -> Any:
        """Return a request that does not run; append it to ``idle`` after its run."""
        try:
            return self.idle.pop()
        except IndexError:  # as many run at once as never before
            return self.network.create_infer_request()


class OpenVinoNetwork:
    """Network in ONNX or OpenVINO's format on the CPU, compiled on demand.

    Small networks are compiled per shape, since static shapes are up to twice as fast. Batches are split into
    ``BATCH_SIZES``, and canvases have few sizes. Large networks are compiled once for all shapes.
    :meth:`run` may be called in several threads.

    Args:
        path: an INT8 network must contain its own quantization (QDQ).
        precision: requested precision. Non-quantized layers of INT8 networks use bf16 if it is fast, else fp32.
        threads: inference threads; None uses all available cores.
        graph: network to run instead of the file's, made from it.
        streams: runs of small inputs at once, each with its share of the threads. Small layers keep few threads busy:
            two runs at once on a core each take less processor time than two in turn on both.

    Attributes:
        streams: runs at once without waiting.
        is_static: the batch or the sides of the input are fixed.

    Raises:
        PackError: an ONNX file fails :func:`check_network`, or OpenVINO cannot read it.
        RuntimeUnavailableError: OpenVINO is not installed.
    """

    engine: Engine = "openvino"

    def __init__(
        self,
        path: Path,
        precision: Precision = "fp32",
        threads: int | None = None,
        graph: bytes | None = None,
        streams: int = 1,
    ) -> None:
        self.path = path
        self.precision = precision
        self.reason = ""
        rest: Precision = precision
        if precision == "int8":
            rest = "bf16" if "bf16" in fast_precisions() else "fp32"
        self._is_large = weights_file(path).stat().st_size >= LARGE_FILE_BYTES
        self.streams = 1 if self._is_large else streams
        self._options = {
            "INFERENCE_PRECISION_HINT": PRECISION_HINTS[rest],
            "INFERENCE_NUM_THREADS": threads or available_cores(),
        }
        if not is_ir(path):
            check_network(path)
        try:
            self._model = _core().read_model(graph or path)
        except Exception as error:  # OpenVINO raises RuntimeError and own exception types
            raise PackError(path.name, f"cannot be opened by OpenVINO: {summarize(error)}") from error
        declared = self._model.inputs[0].partial_shape
        self.input_shape: tuple[int | str | None, ...] = tuple(
            d.get_length() if d.is_static else None for d in (declared if declared.rank.is_static else ())
        )
        self._input_type = input_type(self._model.inputs[0].element_type.get_type_name(), path)
        self.output_names: list[str] = [output.get_any_name() for output in self._model.outputs]
        # SCRFD exports for one photo have outputs without a batch axis, (n, k) instead of (batch, n, k).
        ranks = [output.partial_shape.rank for output in self._model.outputs]
        flat = len(ranks) > 1 and any(rank.is_dynamic or rank.get_length() < 3 for rank in ranks)
        fixed = 1 if flat else next(iter(self.input_shape), None)
        self._fixed = fixed if isinstance(fixed, int) else None
        self.is_static = self._fixed is not None or any(isinstance(side, int) for side in self.input_shape[2:])
        self._compiled: dict[tuple[int, ...], _Compiled] = {}
        self._compiling = threading.Lock()

    @property
    def providers(self) -> list[str]:
        return ["OpenVINO CPU"]

    def run(self, batch: Float) -> list[Float]:
        """Run a batch; see :meth:`Network.run`."""
        return run_in_pieces(batch, self._sizes(batch.shape), self._fixed is not None, self._infer)

    def _infer(self, piece: Float) -> list[Float]:
        # OpenVINO shares memory only with writable arrays.
        given = np.require(piece, self._input_type, ["C", "W"])
        compiled = self._compiled_for(given.shape)
        request = compiled.take()
        try:
            request.set_input_tensor(_import_openvino().Tensor(given, shared_memory=True))
            # In this thread: start_async() hands the run to another, which costs 5 % of a server's rate. Outputs are
            # read below, since those of infer() are converted in Python.
            request.infer(share_outputs=True)
            # Copied, since the next run overwrites the output tensors.
            return [np.array(request.get_output_tensor(i).data, np.float32) for i in range(len(self.output_names))]
        finally:
            compiled.idle.append(request)

    def placement(self, batch: Float) -> dict[str, int]:
        """Return the number of nodes by precision."""
        compiled = self._compiled_for((self._sizes(batch.shape)[0], *batch.shape[1:])).network
        infos = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
        precisions = [
            info["runtimePrecision"].astype(str) for info in infos if info["layerType"].astype(str) not in DATA_LAYERS
        ]
        return {f"OpenVINO {kind}": count for kind, count in Counter(precisions).items()}

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self._fixed is not None:
            return (self._fixed,)
        if self._is_large:
            return tuple(range(1, MAX_DYNAMIC_BATCH + 1))
        return BATCH_SIZES if _is_small(shape) and self.streams == 1 else BATCH_SIZES[:1]

    def _compiled_for(self, shape: tuple[int, ...]) -> _Compiled:
        """Return the network for the shape, compiled if necessary."""
        if self._is_large:
            shape = (self._fixed or -1, *(side if isinstance(side, int) else -1 for side in self.input_shape[1:]))
        if (found := self._compiled.get(shape)) is not None:
            return found
        with self._compiling:  # the model has one shape at a time; runs on other shapes go on meanwhile
            if (found := self._compiled.get(shape)) is not None:
                return found
            try:
                self._model.reshape(list(shape))
                compiled = _Compiled(_core().compile_model(self._model, "CPU", self._options | self._sharing(shape)))
            except Exception as error:
                raise PackError(self.path.name, f"OpenVINO cannot run it on {shape}: {summarize(error)}") from error
            self._compiled[shape] = compiled
            return compiled

    def _sharing(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return how runs on a shape share the cores. Large inputs have all, and the memory of one run."""
        if self.streams > 1 and _is_small(shape):
            return {"NUM_STREAMS": self.streams}
        return {"PERFORMANCE_HINT": "LATENCY"}


def _is_small(shape: tuple[int, ...]) -> bool:
    return shape[-2] * shape[-1] <= MAX_SMALL_PX

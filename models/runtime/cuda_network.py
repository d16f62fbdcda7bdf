"""Networks on NVIDIA GPUs with persistent device buffers, and their conversion to half precision.

:func:`diagnose_cuda` explains why CUDA cannot start, since onnxruntime falls back to the CPU silently.
"""

from __future__ import annotations

import ctypes
import logging
import tempfile
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from models.errors import ModelError, RuntimeUnavailableError
from models.runtime.network import Engine, Float, Precision
from models.runtime.onnx_runtime import (
    CPU,
    OnnxNetwork,
    available_cores,
    available_providers,
    choose_bucket,
    import_onnxruntime,
    profile_nodes,
)

if TYPE_CHECKING:
    import onnx

CUDA: Final = "CUDAExecutionProvider"
MAX_NAME_BYTES: Final = 256
MIN_COSINE: Final = 0.999
"""Required cosine between outputs of the device and of the CPU in fp32."""
MAX_OPENING_THREADS: Final = 8
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Device:
    """Device of buffers and nodes. "cpu" runs the same code without a GPU, for tests."""

    kind: Literal["cuda", "cpu"] = "cuda"
    index: int = 0


@dataclass(frozen=True, eq=False)
class _PreparedShape:
    """Session of one shape with bound buffers. ``staging`` is the host copy of the device buffer ``input``, in its
    element type."""

    session: Any
    binding: Any
    input: Any
    staging: NDArray[Any]


class CudaNetwork:
    """ONNX network on one GPU, run in prepared shapes; batches are padded to the next prepared size.

    Each shape has a session of its own: onnxruntime keeps cuDNN's plans of a convolution for its last shape alone, and
    makes those of another within seconds (https://github.com/microsoft/onnxruntime/issues/23006). Opening runs every
    shape, so that its plans exist, and compares the outputs for ``probe`` with the CPU in fp32. If fp16 overflows, fp32
    is used. A device with other results is rejected.

    Args:
        path: ONNX file.
        shapes: input shapes (n, ...) to prepare.
        probe: (1, ...) float32 input of one of the shapes, in the network's usual range.
        half: compute in fp16.

    Raises:
        PackError: the file fails :func:`check_network`, or onnxruntime cannot open it on the CPU.
        RuntimeUnavailableError: the device cannot start, or its results differ from the CPU.
    """

    engine: Engine = "onnxruntime"

    def __init__(
        self,
        path: Path,
        shapes: Sequence[tuple[int, ...]],
        probe: Float,
        device: Device = Device(),
        half: bool = True,
    ) -> None:
        self.path = path
        self.reason = ""
        self._shapes = sorted(set(shapes))
        self._probe = probe
        self.device = device
        self._lock = threading.Lock()  # The buffers hold one batch at a time.
        self._sizes: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for shape in self._shapes:
            self._sizes[shape[1:]].append(shape[0])
        self._provider = CUDA if device.kind == "cuda" else CPU
        try:
            self._start(half)
        except ModelError:
            raise
        except Exception as error:
            # onnxruntime raises many unrelated types. The caller falls back to the CPU on this one.
            raise RuntimeUnavailableError(f"{path.name} on {device.kind} {device.index}: {error!r}") from error

    @property
    def providers(self) -> list[str]:
        """Providers that the session registered; see :attr:`cpu_nodes` for nodes that ran elsewhere."""
        return list(self._session.get_providers())

    def run(self, batch: Float) -> list[Float]:
        """Run a batch; see :meth:`Network.run`."""
        with self._lock:
            return self._run(batch)

    def _start(self, half: bool) -> None:
        if self.device.kind == "cuda":
            preload_cuda_libraries()
        reference = OnnxNetwork(self.path, CPU, threads=1)
        self.input_name, self.input_shape = reference.input_name, reference.input_shape
        self.output_names, self._input_type = reference.output_names, reference.input_type
        expected = reference.run(self._probe)
        models: list[bytes | str] = [str(self.path)]
        if half and self._input_type is np.float32:  # a network with an fp16 input computes in fp16 already
            models.insert(0, convert_to_fp16(self.path))
        cosine = 0.0
        for model in models:
            self._session = self._open(model)  # later of shapes that are not prepared
            cosine = _min_cosine(expected, self._run_eagerly(self._probe))
            if cosine >= MIN_COSINE:
                break
            log.warning(
                "%s in %s is not used: its cosine with fp32 on the CPU is %.4f",
                self.path.name,
                "fp32" if isinstance(model, str) else "fp16",
                cosine,
            )
        else:
            raise RuntimeUnavailableError(
                f"{self.path.name} on {self.device.kind} {self.device.index} has a cosine of {cosine:.4f} with "
                "the CPU's results: check its driver, libraries and memory"
            )
        self._model = model
        # cuDNN makes plans on one core each.
        with ThreadPoolExecutor(min(MAX_OPENING_THREADS, available_cores())) as threads:
            counted = threads.submit(self._count_cpu_nodes)
            self._prepared = dict(zip(self._shapes, threads.map(self._prepare, self._shapes), strict=True))
        self.cpu_nodes = counted.result()
        device = f"{self.providers[0]} {self.device.index}"
        self.reason = f"on {device} in {self.precision}, {len(self._shapes)} shapes prepared"

    @property
    def precision(self) -> Precision:
        """Precision of the weights and arithmetic."""
        return "fp32" if isinstance(self._model, str) and self._input_type is not np.float16 else "fp16"

    def _open(self, model: bytes | str, options: Any = None) -> Any:
        cuda = {
            "device_id": self.device.index,
            "arena_extend_strategy": "kSameAsRequested",
            # On an H100, a shape took 3 to 5 s; EXHAUSTIVE takes half longer, DEFAULT runs 14 times slower.
            "cudnn_conv_algo_search": "HEURISTIC",
        }
        providers = [(CUDA, cuda), CPU] if self.device.kind == "cuda" else [CPU]
        session = import_onnxruntime().InferenceSession(
            model, options or self._session_options(), providers=providers, enable_fallback=0
        )
        if self._provider not in session.get_providers():
            raise RuntimeUnavailableError(f"{self._provider} is installed but could not start on this machine")
        return session

    def _session_options(self) -> Any:
        options = import_onnxruntime().SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        return options

    def _prepare(self, shape: tuple[int, ...]) -> _PreparedShape:
        """Open a session, allocate input and outputs of a shape on the device, and run it twice."""
        session, device = self._open(self._model), (self.device.kind, self.device.index)
        make = import_onnxruntime().OrtValue.ortvalue_from_shape_and_type
        outputs = session.run(self.output_names, {self.input_name: np.zeros(shape, self._input_type)})
        held = make([int(np.prod(shape))], self._input_type, *device)
        binding = session.io_binding()
        binding.bind_input(self.input_name, *device, self._input_type, shape, held.data_ptr())
        for name, output in zip(self.output_names, outputs, strict=True):
            binding.bind_ortvalue_output(name, make(output.shape, output.dtype.type, *device))
        prepared = _PreparedShape(session, binding, held, np.zeros(shape, self._input_type))
        _run_bound(prepared)
        return prepared

    def _run(self, batch: Float) -> list[Float]:
        sizes = self._sizes.get(batch.shape[1:])
        if sizes is None:
            return self._run_eagerly(batch)
        pieces = []
        for start in range(0, len(batch), sizes[-1]):
            piece = batch[start : start + sizes[-1]]
            prepared = self._prepared[choose_bucket(len(piece), sizes), *batch.shape[1:]]
            prepared.staging[: len(piece)] = piece
            prepared.staging[len(piece) :] = 0
            padded = len(prepared.staging)
            pieces.append([output[: len(output) * len(piece) // padded] for output in _run_bound(prepared)])
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)]

    def _run_eagerly(self, batch: Float) -> list[Float]:
        given = batch.astype(self._input_type, copy=False)
        return [
            np.asarray(output, np.float32) for output in self._session.run(self.output_names, {self.input_name: given})
        ]

    def _count_cpu_nodes(self) -> dict[str, int]:
        """Count nodes by operator that ran off the device. Shape arithmetic is excluded: it belongs on the CPU."""
        options, given = self._session_options(), self._probe.astype(self._input_type, copy=False)
        ran = profile_nodes(options, lambda: self._open(self._model, options), given)
        return dict(Counter(node.operator for node in ran if node.computes and node.provider != self._provider))


def _run_bound(prepared: _PreparedShape) -> list[Float]:
    prepared.input.update_inplace(prepared.staging.reshape(-1))
    prepared.session.run_with_iobinding(prepared.binding)
    prepared.binding.synchronize_outputs()
    return [np.asarray(output, np.float32) for output in prepared.binding.copy_outputs_to_cpu()]


def _min_cosine(expected: Sequence[Float], given: Sequence[Float]) -> float:
    """Return the smallest cosine between corresponding outputs; 0 if a value is not finite."""
    if not all(np.isfinite(output).all() for output in given):
        return 0.0
    pairs = [(a.astype(np.float64).ravel(), b.astype(np.float64).ravel()) for a, b in zip(expected, given, strict=True)]
    norms = [np.linalg.norm(a) * np.linalg.norm(b) for a, b in pairs]
    # Two zero vectors agree: a level of a detector may find nothing.
    return min(
        (float(a @ b / n) if n > 0 else float(np.allclose(a, b)) for (a, b), n in zip(pairs, norms, strict=True))
    )


def convert_to_fp16(path: Path) -> bytes:
    """Return the network with weights and arithmetic in fp16, and inputs and outputs in fp32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with tempfile.TemporaryDirectory() as work, warnings.catch_warnings():
        # The converter warns about every underflow. CudaNetwork compares the result with fp32.
        warnings.simplefilter("ignore")
        converted: onnx.ModelProto = convert_float_to_float16(_fold_constants(path, Path(work)), keep_io_types=True)
    return converted.SerializeToString()


def _fold_constants(path: Path, folder: Path) -> onnx.ModelProto:
    """Fold the casts of fp16 weights, which the converter would keep."""
    import onnx

    runtime = import_onnxruntime()
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "folded.onnx")
    options.log_severity_level = 3
    runtime.InferenceSession(str(path), options, providers=[CPU])
    return onnx.load(folder / "folded.onnx")


def visible_gpus() -> list[str]:
    """Return the names of usable GPUs by index, respecting CUDA_VISIBLE_DEVICES; empty without a driver."""
    try:
        driver = _driver()
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    names = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(MAX_NAME_BYTES)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, MAX_NAME_BYTES, device)
        names.append(name.value.decode())
    return names


def diagnose_cuda() -> str | None:
    """Return the first problem that prevents CUDA from starting and its remedy; None if no problem is found.

    Raises:
        RuntimeUnavailableError: onnxruntime is not installed.
    """
    if CUDA not in available_providers():
        return (
            "the installed onnxruntime has no CUDA: uninstall every onnxruntime, then install this distribution with "
            "its 'gpu' extra instead of 'cpu'"
        )
    try:
        status = _driver().cuInit(0)
    except OSError as error:
        return f"no NVIDIA driver is installed ({error}): install it, or give the container its GPUs (--gpus all)"
    if status:
        return f"the NVIDIA driver finds no usable GPU (cuInit returned {status}): see nvidia-smi"
    if not visible_gpus():
        return "the NVIDIA driver shows no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    preload_cuda_libraries()
    try:
        ctypes.CDLL(str(Path(import_onnxruntime().__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return f"a CUDA library is missing ({error}): install 'onnxruntime-gpu[cuda,cudnn]' of the same version"
    return None


def preload_cuda_libraries() -> None:
    """Load the CUDA and cuDNN libraries of NVIDIA's Python packages, if installed."""
    if hasattr(import_onnxruntime(), "preload_dlls"):
        with redirect_stdout(StringIO()):  # preload_dlls prints missing libraries; diagnose_cuda reports them
            import_onnxruntime().preload_dlls()


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")

"""Networks on NVIDIA GPUs with half precision, persistent device buffers and one CUDA graph per shape."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from models.errors import RuntimeUnavailableError
from models.runtime.cuda import CUDA, TENSORRT, diagnose_cuda, preload_cuda_libraries
from models.runtime.half_precision import convert_to_fp16
from models.runtime.network import Engine, Float, Precision, input_type
from models.runtime.onnx_check import check_network
from models.runtime.onnx_runtime import NodeProfile, choose_bucket, import_onnxruntime, profile_nodes

MIN_COSINE: Final = 0.999
"""Required cosine between outputs of the device and of the CPU in fp32."""
MAX_EXHAUSTIVE_SHAPES: Final = 16
NO_GRAPH_ID: Final = "-1"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Device:
    """Device of buffers and nodes. "cpu" runs the same code without a GPU, for tests."""

    kind: Literal["cuda", "cpu"] = "cuda"
    index: int = 0


@dataclass(frozen=True)
class CudaOptions:
    """Optional features, used where they work: fp16 (``half``), CUDA ``graphs`` and ``tensorrt``."""

    half: bool = True
    graphs: bool = True
    tensorrt: bool = True

    @property
    def captures(self) -> bool:
        """Use of CUDA graphs. TensorRT captures graphs only for some networks and does not report which."""
        return self.graphs and not self.tensorrt


DEFAULT_OPTIONS: Final = CudaOptions()


@dataclass(frozen=True, eq=False)
class _ShapeBuffers:
    """Bound buffers of one shape. ``staging`` is the host copy of the device buffer ``input``, in its element type."""

    binding: Any
    input: Any
    staging: NDArray[Any]
    run_options: Any


class CudaNetwork:
    """ONNX network on one GPU, run in prepared shapes; batches are padded to the next prepared size.

    Opening runs every shape, to warm up kernels and capture graphs, and compares the outputs for ``probe`` with the
    CPU in fp32. If fp16 overflows, fp32 is used. A device with other results is rejected.

    Args:
        path: ONNX file.
        shapes: input shapes (n, ...) to prepare.
        probe: (1, ...) float32 input of one of the shapes, in the network's usual range.
        folder: cache of fp16 networks and TensorRT engines.

    Raises:
        PackError: the file fails :func:`check_network`.
        RuntimeUnavailableError: the device cannot start, or its results differ from the CPU.
    """

    engine: Engine = "onnxruntime"

    def __init__(
        self,
        path: Path,
        shapes: Sequence[tuple[int, ...]],
        probe: Float,
        folder: Path,
        device: Device = Device(),
        options: CudaOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.path = path
        self.reason = ""
        self._shapes = sorted(set(shapes))
        self._probe = probe
        self._folder = folder
        self.device = device
        # onnxruntime stores captured graphs per thread, so one thread runs everything.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{device.kind}-{device.index}")
        self._sizes: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for shape in self._shapes:
            self._sizes[shape[1:]].append(shape[0])
        self._buffers: dict[tuple[int, ...], _ShapeBuffers] = {}
        self._inputs: dict[int, Any] = {}
        check_network(path)
        try:
            self._thread.submit(self._start, options).result()
        except Exception as error:
            self._thread.shutdown(wait=False)
            if isinstance(error, RuntimeUnavailableError):
                raise
            # onnxruntime raises many unrelated types. The caller falls back to the CPU on this one.
            raise RuntimeUnavailableError(f"{path.name} on {device.kind} {device.index}: {error!r}") from error
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    @property
    def providers(self) -> list[str]:
        """Providers that the session registered; see :attr:`cpu_nodes` for nodes that ran elsewhere."""
        return list(self._session.get_providers())

    def run(self, batch: Float) -> list[Float]:
        """Run a batch; see :meth:`Network.run`."""
        return self._thread.submit(self._run, batch).result()

    def _start(self, options: CudaOptions) -> None:
        if self.device.kind == "cuda":
            preload_cuda_libraries()
        expected = self._run_on_cpu()
        # A network with an fp16 input computes in fp16 already.
        converts = options.half and self._input_type is np.float32
        half = convert_to_fp16(self.path, self._folder) if converts else None
        cosine = 0.0
        for file in filter(None, (half, self.path)):
            self.options = self._open_best(file, replace(options, half=file is not self.path))
            cosine = _min_cosine(expected, self._run_eagerly(self._probe))
            if cosine >= MIN_COSINE:
                break
            log.warning(
                "%s in %s is not used: its cosine with fp32 on the CPU is %.4f",
                self.path.name,
                "fp16" if file == half else "fp32",
                cosine,
            )
        else:
            raise RuntimeUnavailableError(
                f"{self.path.name} on {self.device.kind} {self.device.index} has a cosine of {cosine:.4f} with "
                "the CPU's results: check its driver, libraries and memory"
            )
        self.file = file
        self.cpu_nodes = self._count_cpu_nodes()
        for number, shape in enumerate(self._shapes, 1):
            self._buffers[shape] = self._bind(shape, number)
            self._replay(self._buffers[shape])
        self.reason = self.describe()

    @property
    def precision(self) -> Precision:
        """Precision of the weights and arithmetic."""
        return "fp32" if self.file == self.path and self._input_type is not np.float16 else "fp16"

    def placement(self, batch: Float) -> dict[str, int]:
        """Run once under the profiler and return the number of nodes that each provider executed."""
        return self._thread.submit(self._placement, batch).result()

    def describe(self) -> str:
        """Describe device, precision and number of prepared shapes."""
        graphs = ", CUDA graphs" if self.device.kind == "cuda" and self.options.captures else ""
        device = f"{self.providers[0]} {self.device.index}"
        return f"on {device} in {self.precision}{graphs}, {len(self._shapes)} shapes prepared"

    def _run_on_cpu(self) -> list[Float]:
        session = self._open(self.path, ["CPUExecutionProvider"])
        inputs, outputs = session.get_inputs(), session.get_outputs()
        self.input_name: str = inputs[0].name
        self.input_shape: tuple[int | str | None, ...] = tuple(inputs[0].shape)
        self.output_names: list[str] = [output.name for output in outputs]
        self._input_type = input_type(inputs[0].type, self.path)
        ran = session.run(self.output_names, {self.input_name: self._probe.astype(self._input_type, copy=False)})
        return [np.asarray(output, np.float32) for output in ran]

    def _open_best(self, file: Path, options: CudaOptions) -> CudaOptions:
        """Open the session with as many ``options`` as possible and return those in use."""
        if self.device.kind == "cpu":
            self._session = self._open(file, ["CPUExecutionProvider"])
            return options
        tensorrt = [options] if options.tensorrt and find_spec("tensorrt") is not None else []
        plain = replace(options, tensorrt=False)
        eager = replace(plain, graphs=False)
        failure: Exception | None = None
        for candidate in (*tensorrt, plain, eager):
            try:
                self._session = self._open(file, self._providers(candidate))
                return candidate
            except (RuntimeUnavailableError, ImportError, OSError) as error:  # TensorRT raises the last two
                log.warning("%s: %s", self.path.name, error)
                failure = error
        raise RuntimeUnavailableError(diagnose_cuda() or str(failure))

    def _providers(self, options: CudaOptions) -> list[Any]:
        cuda = {
            "device_id": self.device.index,
            "arena_extend_strategy": "kSameAsRequested",
            # An exhaustive search over the many shapes of a detector takes minutes.
            "cudnn_conv_algo_search": "EXHAUSTIVE" if len(self._shapes) <= MAX_EXHAUSTIVE_SHAPES else "HEURISTIC",
            "enable_cuda_graph": int(options.captures),
        }
        if not options.tensorrt:
            return [(CUDA, cuda), "CPUExecutionProvider"]
        import_module("tensorrt")  # loads the libraries that onnxruntime needs
        engines = str(self._folder / "tensorrt")
        items = np.array(self._shapes)
        tensorrt = {
            "device_id": self.device.index,
            "trt_fp16_enable": options.half,
            "trt_engine_cache_enable": True,
            "trt_engine_cache_path": engines,
            "trt_timing_cache_enable": True,
            "trt_timing_cache_path": engines,
            "trt_profile_min_shapes": self._profile(items.min(0)),
            "trt_profile_opt_shapes": self._profile(items.max(0)),
            "trt_profile_max_shapes": self._profile(items.max(0)),
        }
        return [(TENSORRT, tensorrt), (CUDA, cuda), "CPUExecutionProvider"]

    def _profile(self, shape: Sequence[int]) -> str:
        return f"{self.input_name}:{'x'.join(str(side) for side in shape)}"

    def _open(self, file: Path, providers: list[Any], options: Any = None) -> Any:
        first = providers[0] if isinstance(providers[0], str) else providers[0][0]
        try:
            session = import_onnxruntime().InferenceSession(
                str(file), options or self._session_options(), providers=providers, enable_fallback=0
            )
        except Exception as error:  # onnxruntime raises many unrelated types
            raise RuntimeUnavailableError(f"{self.path.name} cannot be opened on {first}: {error}") from error
        if first not in session.get_providers():
            raise RuntimeUnavailableError(f"{first} is installed but could not start on this machine")
        return session

    def _session_options(self) -> Any:
        options = import_onnxruntime().SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        return options

    def _bind(self, shape: tuple[int, ...], number: int) -> _ShapeBuffers:
        """Allocate input and outputs of a shape at fixed addresses, as captured graphs require.

        Shapes with equal numbers of elements share one input buffer, since only one runs at a time.
        """
        device = (self.device.kind, self.device.index)
        make = import_onnxruntime().OrtValue.ortvalue_from_shape_and_type
        count = int(np.prod(shape))
        if count not in self._inputs:
            self._inputs[count] = make([count], self._input_type, *device)
        outputs = self._run_uncast(np.zeros(shape, np.float32))
        binding = self._session.io_binding()
        binding.bind_input(self.input_name, *device, self._input_type, shape, self._inputs[count].data_ptr())
        for name, output in zip(self.output_names, outputs, strict=True):
            binding.bind_ortvalue_output(name, make(output.shape, output.dtype.type, *device))
        run_options = import_onnxruntime().RunOptions()
        run_options.add_run_config_entry("gpu_graph_id", str(number))
        return _ShapeBuffers(binding, self._inputs[count], np.zeros(shape, self._input_type), run_options)

    def _run(self, batch: Float) -> list[Float]:
        sizes = self._sizes.get(batch.shape[1:])
        if sizes is None:
            return self._run_eagerly(batch)
        pieces = []
        for start in range(0, len(batch), sizes[-1]):
            piece = batch[start : start + sizes[-1]]
            buffers = self._buffers[choose_bucket(len(piece), sizes), *batch.shape[1:]]
            buffers.staging[: len(piece)] = piece
            buffers.staging[len(piece) :] = 0
            padded = len(buffers.staging)
            pieces.append([output[: len(output) * len(piece) // padded] for output in self._replay(buffers)])
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)]

    def _replay(self, buffers: _ShapeBuffers) -> list[Float]:
        buffers.input.update_inplace(buffers.staging.reshape(-1))
        self._session.run_with_iobinding(buffers.binding, buffers.run_options)
        buffers.binding.synchronize_outputs()
        return [np.asarray(output, np.float32) for output in buffers.binding.copy_outputs_to_cpu()]

    def _run_eagerly(self, batch: Float) -> list[Float]:
        return [np.asarray(output, np.float32) for output in self._run_uncast(batch)]

    def _run_uncast(self, batch: Float) -> list[NDArray[Any]]:
        """Run without a CUDA graph: the first run of a shape, and unprepared shapes."""
        run_options = import_onnxruntime().RunOptions()
        run_options.add_run_config_entry("gpu_graph_id", NO_GRAPH_ID)
        given = batch.astype(self._input_type, copy=False)
        outputs: list[NDArray[Any]] = self._session.run(self.output_names, {self.input_name: given}, run_options)
        return outputs

    def _count_cpu_nodes(self) -> dict[str, int]:
        """Count nodes by operator that ran off the device. Shape arithmetic is excluded: it belongs on the CPU."""
        wanted = {"CPUExecutionProvider"} if self.device.kind == "cpu" else {CUDA, TENSORRT}
        ran = self._profiled(self._probe)
        return dict(Counter(node.operator for node in ran if node.computes and node.provider not in wanted))

    def _placement(self, batch: Float) -> dict[str, int]:
        return dict(Counter(node.provider for node in self._profiled(batch)))

    def _profiled(self, batch: Float) -> list[NodeProfile]:
        providers = ["CPUExecutionProvider"]
        if self.device.kind == "cuda":
            providers = self._providers(replace(self.options, graphs=False))
        options = self._session_options()
        given = batch.astype(self._input_type, copy=False)
        return profile_nodes(options, lambda: self._open(self.file, providers, options), given)


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

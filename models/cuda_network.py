"""A network on an NVIDIA GPU: half precision, buffers that stay where the device reads them, one CUDA graph a shape."""

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

from models.cuda import CUDA, TENSORRT, load_libraries, why_not_cuda
from models.errors import RuntimeUnavailableError
from models.half_precision import half_precision
from models.network import Engine, Float, Precision
from models.onnx_check import check_network
from models.runtime import NodeRun, bucket, library, nodes_run

MIN_COSINE: Final = 0.999
"""Between this device's outputs and the CPU's in fp32, for the same input."""
MANY_SHAPES: Final = 16
NO_GRAPH: Final = "-1"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Device:
    """Where buffers lie and nodes run. "cpu" runs the very same code without a GPU."""

    kind: Literal["cuda", "cpu"] = "cuda"
    index: int = 0


@dataclass(frozen=True)
class Numbers:
    """What may be used where it works: ``half`` precision, CUDA ``graphs``, channels last (``nhwc``), ``tensorrt``."""

    half: bool = True
    graphs: bool = True
    nhwc: bool = False
    tensorrt: bool = True

    @property
    def captures(self) -> bool:
        """TensorRT's provider captures only networks that it runs whole, and says nothing of the others."""
        return self.graphs and not self.tensorrt


BEST: Final = Numbers()


@dataclass(frozen=True, eq=False)
class _Bound:
    """One shape's buffers, bound; ``staging`` is filled here and copied to ``input`` there."""

    binding: Any
    input: Any
    staging: Float
    run_options: Any


class CudaNetwork:
    """One ONNX network on one GPU, run in the shapes it was opened for; batches are filled up to the next of them.

    Opening it runs every shape, so that the first request meets warm kernels and captured graphs, and compares what
    comes out for ``probe`` with the CPU's fp32: half precision that overflows is given up for fp32, and a device that
    gives anything else is refused.

    Args:
        path: the pack's file.
        shapes: whole input shapes (n, ...) to prepare, all of the ranks of ``probe``.
        probe: (1, ...) float32 input of one of those shapes' items, of the range the network is used to.
        folder: where files made for the GPU are kept: the network in fp16, TensorRT's engines.

    Raises:
        RuntimeUnavailableError: the device cannot start or gives other results than the CPU; says why.
    """

    engine: Engine = "onnxruntime"

    def __init__(
        self,
        path: Path,
        shapes: Sequence[tuple[int, ...]],
        probe: Float,
        folder: Path,
        device: Device = Device(),
        numbers: Numbers = BEST,
    ) -> None:
        self.path = path
        self.why = ""
        self._shapes = sorted(set(shapes))
        self._probe = probe
        self._folder = folder
        self.device = device
        # onnxruntime keeps captured graphs by thread: what one thread captured, another would capture again.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{device.kind}-{device.index}")
        self._sizes: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for shape in self._shapes:
            self._sizes[shape[1:]].append(shape[0])
        self._bound: dict[tuple[int, ...], _Bound] = {}
        self._inputs: dict[int, Any] = {}
        check_network(path)
        try:
            self._thread.submit(self._start, numbers).result()
        except Exception as error:
            self._thread.shutdown(wait=False)
            if isinstance(error, RuntimeUnavailableError):
                raise
            # onnxruntime raises a dozen unrelated types, folders may not be writable: none of it ends the service.
            raise RuntimeUnavailableError(f"{path.name} on {device.kind} {device.index}: {error!r}") from error
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    @property
    def providers(self) -> list[str]:
        """The providers the session registered; see :attr:`strays` for what ran elsewhere than on the first."""
        return list(self._session.get_providers())

    def run(self, batch: Float) -> list[Float]:
        """Run ``batch`` (n, ...) and return every output with its rows in order: n of them, or where a network has no
        batch axis in its outputs, those of each input one after the other."""
        return self._thread.submit(self._run, batch).result()

    def _start(self, numbers: Numbers) -> None:
        if self.device.kind == "cuda":
            load_libraries()
        expected = self._on_cpu()
        half = half_precision(self.path, self._folder) if numbers.half else None
        agreement = 0.0
        for file in filter(None, (half, self.path)):
            self.numbers = self._open_best(file, replace(numbers, half=file is not self.path))
            agreement = _agreement(expected, self._eager(self._probe))
            if agreement >= MIN_COSINE:
                break
            log.warning(
                "%s in %s gives cosine %.4f with fp32 on the CPU: not used",
                self.path.name,
                "fp16" if file == half else "fp32",
                agreement,
            )
        else:
            raise RuntimeUnavailableError(
                f"{self.path.name} on {self.device.kind} {self.device.index} gives cosine {agreement:.4f} with the "
                "CPU's results: its driver, libraries or memory are at fault"
            )
        self.file = file
        self.strays = self._find_strays()
        for number, shape in enumerate(self._shapes, 1):
            self._bound[shape] = self._bind(shape, number)
            self._replay(self._bound[shape])
        self.why = self.describe()

    @property
    def precision(self) -> Precision:
        return "fp32" if self.file == self.path else "fp16"

    def placement(self, batch: Float) -> dict[str, int]:
        """Run once under the profiler; return how many nodes each provider really executed."""
        return self._thread.submit(self._placement, batch).result()

    def describe(self) -> str:
        """In words: where, in which numbers, in how many shapes."""
        graphs = ", CUDA graphs" if self.device.kind == "cuda" and self.numbers.captures else ""
        where = f"{self.providers[0]} {self.device.index}"
        return f"on {where} in {self.precision}{graphs}, {len(self._shapes)} shapes prepared"

    def _on_cpu(self) -> list[Float]:
        session = self._open(self.path, ["CPUExecutionProvider"])
        inputs, outputs = session.get_inputs(), session.get_outputs()
        self.input_name: str = inputs[0].name
        self.input_shape: tuple[int | str | None, ...] = tuple(inputs[0].shape)
        self.output_names: list[str] = [output.name for output in outputs]
        return [np.asarray(output) for output in session.run(self.output_names, {self.input_name: self._probe})]

    def _open_best(self, file: Path, numbers: Numbers) -> Numbers:
        """Open the session with all of ``numbers`` that this machine and this network allow; returns what those are."""
        if self.device.kind == "cpu":
            self._session = self._open(file, ["CPUExecutionProvider"])
            return numbers
        tensorrt = [numbers] if numbers.tensorrt and find_spec("tensorrt") is not None else []
        plain = replace(numbers, tensorrt=False)
        eager = replace(plain, graphs=False)
        failure: Exception | None = None
        for tried in (*tensorrt, plain, eager):
            try:
                self._session = self._open(file, self._providers(tried))
                return tried
            except (RuntimeUnavailableError, ImportError, OSError) as error:  # of TensorRT's package, too
                log.warning("%s: %s", self.path.name, error)
                failure = error
        raise RuntimeUnavailableError(why_not_cuda() or str(failure))

    def _providers(self, numbers: Numbers) -> list[Any]:
        cuda = {
            "device_id": self.device.index,
            "arena_extend_strategy": "kSameAsRequested",
            # The search times every algorithm for every convolution of every shape: minutes for a detector's.
            "cudnn_conv_algo_search": "EXHAUSTIVE" if len(self._shapes) <= MANY_SHAPES else "HEURISTIC",
            "prefer_nhwc": int(numbers.nhwc),
            "enable_cuda_graph": int(numbers.captures),
        }
        if not numbers.tensorrt:
            return [(CUDA, cuda), "CPUExecutionProvider"]
        import_module("tensorrt")  # loads the libraries that onnxruntime then finds
        engines = str(self._folder / "tensorrt")
        items = np.array(self._shapes)
        tensorrt = {
            "device_id": self.device.index,
            "trt_fp16_enable": numbers.half,
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
            session = library().InferenceSession(
                str(file), options or self._options(), providers=providers, enable_fallback=0
            )
        except Exception as error:  # onnxruntime raises a dozen unrelated types here
            raise RuntimeUnavailableError(f"{self.path.name} cannot be opened on {first}: {error}") from error
        if first not in session.get_providers():
            raise RuntimeUnavailableError(f"{first} is installed but could not start on this machine")
        return session

    def _options(self) -> Any:
        options = library().SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        return options

    def _bind(self, shape: tuple[int, ...], number: int) -> _Bound:
        """Fixed addresses for a shape's input and outputs: what a captured graph reads and writes ever after.

        Shapes of as many elements share one input buffer: one of them runs at a time.
        """
        where = (self.device.kind, self.device.index)
        make = library().OrtValue.ortvalue_from_shape_and_type
        count = int(np.prod(shape))
        if count not in self._inputs:
            self._inputs[count] = make([count], np.float32, *where)
        outputs = self._eager(np.zeros(shape, np.float32))
        binding = self._session.io_binding()
        binding.bind_input(self.input_name, *where, np.float32, shape, self._inputs[count].data_ptr())
        for name, output in zip(self.output_names, outputs, strict=True):
            binding.bind_ortvalue_output(name, make(output.shape, np.float32, *where))
        run_options = library().RunOptions()
        run_options.add_run_config_entry("gpu_graph_id", str(number))
        return _Bound(binding, self._inputs[count], np.zeros(shape, np.float32), run_options)

    def _run(self, batch: Float) -> list[Float]:
        sizes = self._sizes.get(batch.shape[1:])
        if sizes is None:
            return self._eager(batch)
        pieces = []
        for start in range(0, len(batch), sizes[-1]):
            piece = batch[start : start + sizes[-1]]
            bound = self._bound[bucket(len(piece), sizes), *batch.shape[1:]]
            bound.staging[: len(piece)] = piece
            bound.staging[len(piece) :] = 0
            filled = len(bound.staging)
            pieces.append([output[: len(output) * len(piece) // filled] for output in self._replay(bound)])
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)]

    def _replay(self, bound: _Bound) -> list[Float]:
        bound.input.update_inplace(bound.staging.reshape(-1))
        self._session.run_with_iobinding(bound.binding, bound.run_options)
        bound.binding.synchronize_outputs()
        outputs: list[Float] = bound.binding.copy_outputs_to_cpu()
        return outputs

    def _eager(self, batch: Float) -> list[Float]:
        """Without a graph: the first run of a shape, and shapes that nobody prepared."""
        run_options = library().RunOptions()
        run_options.add_run_config_entry("gpu_graph_id", NO_GRAPH)
        outputs: list[Float] = self._session.run(self.output_names, {self.input_name: batch}, run_options)
        return outputs

    def _find_strays(self) -> dict[str, int]:
        """Operators, with how many nodes of each, that ran elsewhere than on this device, by the session's own
        profile. Arithmetic on shapes belongs on the CPU and is none."""
        wanted = {"CPUExecutionProvider"} if self.device.kind == "cpu" else {CUDA, TENSORRT}
        ran = self._profiled(self._probe)
        return dict(Counter(node.operator for node in ran if node.computes and node.provider not in wanted))

    def _placement(self, batch: Float) -> dict[str, int]:
        return dict(Counter(node.provider for node in self._profiled(batch)))

    def _profiled(self, batch: Float) -> list[NodeRun]:
        providers = ["CPUExecutionProvider"]
        if self.device.kind == "cuda":
            providers = self._providers(replace(self.numbers, graphs=False))
        options = self._options()
        return nodes_run(options, lambda: self._open(self.file, providers, options), batch)


def _agreement(expected: Sequence[Float], given: Sequence[Float]) -> float:
    """Smallest cosine between the two results' outputs; 0 where one is not finite."""
    if not all(np.isfinite(output).all() for output in given):
        return 0.0
    pairs = [(a.astype(np.float64).ravel(), b.astype(np.float64).ravel()) for a, b in zip(expected, given, strict=True)]
    norms = [np.linalg.norm(a) * np.linalg.norm(b) for a, b in pairs]
    # Nothing there on either side is agreement: a detector whose last level is silent.
    return min(
        (float(a @ b / n) if n > 0 else float(np.allclose(a, b)) for (a, b), n in zip(pairs, norms, strict=True))
    )

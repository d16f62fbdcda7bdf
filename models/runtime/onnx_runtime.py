"""ONNX Runtime: sessions, threads, execution providers, batch sizes and profiling."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.errors import PackError, RuntimeUnavailableError, summarize
from models.runtime.network import Engine, Float, Precision, input_type
from models.runtime.onnx_check import check_network

# ONNX Runtime 1.31 reads this at import. Without it, telemetry writes a device id and events to the home directory.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32)
INT8_CPU_FLAGS: Final = frozenset({"avx512_vnni", "avx_vnni", "asimddp"})
"""Flags in /proc/cpuinfo of x86 and ARM processors with fast INT8 dot products."""
CPU: Final = "CPUExecutionProvider"
PREFERRED_PROVIDERS: Final = ("CUDAExecutionProvider", CPU)


def available_cores() -> int:
    """Return the number of usable cores, limited by CPU affinity and the quota of cgroup version 2."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def import_onnxruntime() -> Any:
    """Import and return onnxruntime. Raises RuntimeUnavailableError."""
    # Imported on demand: processes that run no network here save its memory.
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeUnavailableError(
            "onnxruntime is not installed: install the distribution with its 'cpu' or 'gpu' extra"
        ) from error
    return onnxruntime


def is_gpu_build() -> bool:
    """Tell whether the installed onnxruntime supports CUDA, without importing it."""
    spec = find_spec("onnxruntime")
    folders = (spec.submodule_search_locations if spec else None) or []
    return any((Path(folder) / "capi" / "libonnxruntime_providers_cuda.so").exists() for folder in folders)


def has_fast_int8() -> bool:
    """Tell whether the processor has INT8 dot products; without them INT8 is slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return False
    return not INT8_CPU_FLAGS.isdisjoint(flags)


def supported_precisions() -> frozenset[Precision]:
    """Return the precisions that the CPU provider computes in, fast or not."""
    return frozenset({"fp32", "int8"})


def fast_precisions() -> frozenset[Precision]:
    """Return fp32, and INT8 where the processor runs it faster."""
    return supported_precisions() if has_fast_int8() else frozenset({"fp32"})


def available_providers() -> list[str]:
    """Return the installed providers, which may still fail to start. Raises RuntimeUnavailableError."""
    return list(import_onnxruntime().get_available_providers())


def runtime_version() -> str:
    """Return the version of onnxruntime. Raises RuntimeUnavailableError."""
    return str(import_onnxruntime().__version__)


def choose_bucket(count: int, buckets: Sequence[int] = BATCH_BUCKETS) -> int:
    """Return the smallest bucket of at least ``count``, or the largest bucket."""
    return next((b for b in buckets if b >= count), buckets[-1])


def split_batch(count: int, sizes: Sequence[int] = BATCH_BUCKETS) -> Iterator[slice]:
    """Yield slices of a batch, each as long as the largest of ``sizes`` that fits; the last may be shorter than all."""
    start = 0
    while start < count:
        size = max((size for size in sizes if size <= count - start), default=min(sizes))
        yield slice(start, min(count, start + size))
        start += size


def run_in_pieces(
    batch: Float, sizes: Sequence[int], is_fixed: bool, infer: Callable[[Float], list[Float]]
) -> list[Float]:
    """Run a batch in pieces of these ``sizes``, and return each output for all rows.

    Args:
        is_fixed: the network takes only batches of the first size; shorter ones are padded with zeros.
    """
    pieces = []
    for rows in split_batch(len(batch), sizes):
        piece = batch[rows]
        missing = sizes[0] - len(piece) if is_fixed else 0
        if missing:
            outputs = infer(np.concatenate([piece, np.zeros((missing, *piece.shape[1:]), np.float32)]))
            outputs = [output[: len(piece)] for output in outputs]
        else:
            outputs = infer(piece)
        pieces.append(outputs)
    return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)]


class OnnxNetwork:
    """ONNX network on one execution provider, run in fixed batch sizes.

    Every new shape takes memory, so batches are split into a few sizes. Padding instead would waste compute on a CPU.

    Args:
        provider: required execution provider; None selects CUDA if available, else the CPU.
        threads: intra-op threads; None uses all available cores.
        graph: network to run instead of the file's, made from it.

    Attributes:
        is_static: the batch or the sides of the input are fixed.

    Raises:
        PackError: the file fails :func:`check_network`, or onnxruntime cannot open it on the CPU.
        RuntimeUnavailableError: ``provider`` cannot start or open the file.
    """

    engine: Engine = "onnxruntime"

    def __init__(
        self,
        path: Path,
        provider: str | None = None,
        threads: int | None = None,
        precision: Precision = "fp32",
        graph: bytes | None = None,
    ) -> None:
        self.path = path
        self._graph = graph
        self.precision = precision
        self.reason = ""
        self._threads = threads or available_cores()
        wanted: list[str] = [provider] if provider else [p for p in PREFERRED_PROVIDERS if p in available_providers()]
        if provider and provider not in available_providers():
            raise RuntimeUnavailableError(
                f"{provider} is not in this onnxruntime; it has {', '.join(available_providers())}"
            )
        check_network(path)
        self._session = self.open_session(wanted, self.session_options())
        if provider and provider not in self._session.get_providers():
            raise RuntimeUnavailableError(f"{provider} is installed but could not start on this machine")
        self.input_name: str = self._session.get_inputs()[0].name
        self.input_shape: tuple[int | str | None, ...] = tuple(self._session.get_inputs()[0].shape)
        self.input_type = input_type(self._session.get_inputs()[0].type, path)
        self.output_names: list[str] = [o.name for o in self._session.get_outputs()]
        outputs = self._session.get_outputs()
        # SCRFD exports for one photo have outputs without a batch axis, (n, k) instead of (batch, n, k).
        flat = len(outputs) > 1 and min(len(o.shape) for o in outputs) < 3
        fixed = 1 if flat else next(iter(self.input_shape), None)
        self._is_fixed = isinstance(fixed, int)
        self._sizes: tuple[int, ...] = (fixed,) if isinstance(fixed, int) else BATCH_BUCKETS
        self.is_static = self._is_fixed or any(isinstance(side, int) for side in self.input_shape[2:])

    def session_options(self) -> Any:
        """Return new session options for this network."""
        options = import_onnxruntime().SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads would take cores from image decoding and the other network.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return options

    def open_session(self, providers: list[str], options: Any) -> Any:
        """Open a session of this network. Raises PackError on the CPU, RuntimeUnavailableError on other providers."""
        try:
            return import_onnxruntime().InferenceSession(self._graph or str(self.path), options, providers=providers)
        except Exception as error:  # onnxruntime raises a dozen unrelated types here
            if providers == [CPU]:
                raise PackError(self.path.name, f"cannot be opened by onnxruntime: {summarize(error)}") from error
            raise RuntimeUnavailableError(f"{self.path.name} cannot be opened: {summarize(error)}") from error

    @property
    def providers(self) -> list[str]:
        """Providers that the session registered; see :meth:`placement` for those that ran nodes."""
        return list(self._session.get_providers())

    def run(self, batch: Float) -> list[Float]:
        """Run a batch; see :meth:`Network.run`."""
        return run_in_pieces(batch, self._sizes, self._is_fixed, self._infer)

    def _infer(self, piece: Float) -> list[Float]:
        ran = self._session.run(self.output_names, {self.input_name: piece.astype(self.input_type, copy=False)})
        return [np.asarray(output, np.float32) for output in ran]

    def placement(self, batch: Float) -> dict[str, int]:
        """Run once under the profiler and return the number of nodes that each provider executed."""
        options = self.session_options()
        given = batch.astype(self.input_type, copy=False)
        ran = profile_nodes(options, lambda: self.open_session(self._session.get_providers(), options), given)
        return dict(Counter(node.provider for node in ran))


@dataclass(frozen=True)
class NodeProfile:
    """Profile of one executed node. ``computes`` is False for shape arithmetic."""

    provider: str
    operator: str
    computes: bool


def profile_nodes(options: Any, open_session: Callable[[], Any], batch: NDArray[Any]) -> list[NodeProfile]:
    """Open a session with profiling, run it once, and return the nodes that ran."""
    with tempfile.TemporaryDirectory() as folder:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = open_session()
        session.run(None, {session.get_inputs()[0].name: batch})
        events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    ran = [event["args"] for event in events if event.get("cat") == "Node" and event["args"].get("provider")]
    return [
        NodeProfile(args["provider"], args.get("op_name", ""), _computes(args.get("output_type_shape", [])))
        for args in ran
    ]


def _computes(outputs: list[dict[str, list[int]]]) -> bool:
    return any("float" in kind or kind == "double" for output in outputs for kind in output)

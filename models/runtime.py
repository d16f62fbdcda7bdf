"""onnxruntime: sessions, threads, providers, shape buckets, and what really ran where. What else is wanted of it, its
converter and its quantiser, is imported where that is (models.half_precision, training.quantisation)."""

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

from models.errors import RuntimeUnavailableError
from models.network import Engine, Float, Precision
from models.onnx_check import check_network

# Read when the library is imported: without it onnxruntime 1.31 writes a device id and an event database under the
# home directory, which a face service must not.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32)
VNNI: Final = frozenset({"avx512_vnni", "avx_vnni", "asimddp"})
"""As Linux names it on x86 and ARM."""
PREFERRED_PROVIDERS: Final = ("CUDAExecutionProvider", "CPUExecutionProvider")


def available_cores() -> int:
    """Cores this process may really use: its affinity, and the control group's quota where one is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            fields = Path(quota_file).read_text(encoding="ascii").split()
            period = Path(period_file).read_text(encoding="ascii").strip() if period_file else fields[1]
        except (OSError, IndexError):
            continue
        if fields[0] not in ("max", "-1"):
            return max(1, min(cores, math.ceil(int(fields[0]) / int(period))))
    return cores


def library() -> Any:
    """onnxruntime itself. Raises RuntimeUnavailableError: it is not installed."""
    # Imported here: it costs memory that a process whose networks run elsewhere need not spend.
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeUnavailableError(
            "onnxruntime is not installed: install the distribution with its 'cpu' or 'gpu' extra"
        ) from error
    return onnxruntime


def is_installed() -> bool:
    return find_spec("onnxruntime") is not None


def is_gpu_build() -> bool:
    """Whether the installed onnxruntime has CUDA; tells it without importing it."""
    found = find_spec("onnxruntime")
    folders = (found.submodule_search_locations if found else None) or []
    return any((Path(folder) / "capi" / "libonnxruntime_providers_cuda.so").exists() for folder in folders)


def has_fast_int8() -> bool:
    """Whether this processor multiplies bytes in one instruction: without it INT8 is slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return False
    return not VNNI.isdisjoint(flags)


def available_providers() -> list[str]:
    """Execution providers of the installed onnxruntime, whether or not they can start here.

    Raises:
        RuntimeUnavailableError: there is none.
    """
    return list(library().get_available_providers())


def runtime_version() -> str:
    """Raises RuntimeUnavailableError."""
    return str(library().__version__)


def bucket(count: int, buckets: Sequence[int] = BATCH_BUCKETS) -> int:
    """The smallest bucket that holds ``count``; the largest where none does."""
    return next((b for b in buckets if b >= count), buckets[-1])


def cut(count: int, sizes: Sequence[int] = BATCH_BUCKETS) -> Iterator[slice]:
    """Slices of a batch of ``count``, each as long as the largest of ``sizes`` that fits; where none does the last is
    shorter than the least of them."""
    start = 0
    while start < count:
        size = max((size for size in sizes if size <= count - start), default=min(sizes))
        yield slice(start, min(count, start + size))
        start += size


def filled(piece: Float, size: int) -> Float:
    """``piece`` with zeros behind it, ``size`` in all."""
    if len(piece) == size:
        return piece
    return np.concatenate([piece, np.zeros((size - len(piece), *piece.shape[1:]), np.float32)])


class OnnxNetwork:
    """One ONNX network on one execution provider, run in fixed batch sizes.

    Varying batch shapes are what makes a runtime's memory grow, so a batch is cut into pieces of few sizes; filling it
    up to the next size would cost a processor as much as the filling is long.

    Raises:
        PackError: the file holds what is not opened (models.onnx_check).
        RuntimeUnavailableError: it is no network this runtime can open, or ``provider`` was demanded and cannot start
            here.
    """

    engine: Engine = "onnxruntime"

    def __init__(
        self, path: Path, provider: str | None = None, threads: int | None = None, precision: Precision = "fp32"
    ) -> None:
        self.path = path
        self.precision = precision
        self.why = ""
        self._threads = threads or available_cores()
        wanted: list[str] = [provider] if provider else [p for p in PREFERRED_PROVIDERS if p in available_providers()]
        if provider and provider not in available_providers():
            raise RuntimeUnavailableError(
                f"{provider} is not in this onnxruntime; it has {', '.join(available_providers())}"
            )
        check_network(path)
        self._session = self._open(wanted, self._options())
        if provider and provider not in self._session.get_providers():
            raise RuntimeUnavailableError(f"{provider} is installed but could not start on this machine")
        self.input_name: str = self._session.get_inputs()[0].name
        self.input_shape: tuple[int | str | None, ...] = tuple(self._session.get_inputs()[0].shape)
        self.output_names: list[str] = [o.name for o in self._session.get_outputs()]
        outputs = self._session.get_outputs()
        # SCRFD exports for one photo have outputs without a batch axis, (n, k) instead of (batch, n, k).
        flat = len(outputs) > 1 and min(len(o.shape) for o in outputs) < 3
        fixed = 1 if flat else self.input_shape[0]
        self._is_fixed = isinstance(fixed, int)
        self._sizes: tuple[int, ...] = (fixed,) if isinstance(fixed, int) else BATCH_BUCKETS

    def _options(self) -> Any:
        options = library().SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # A spinning pool burns the cores that decoding and the other network need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return options

    def _open(self, providers: list[str], options: Any) -> Any:
        try:
            return library().InferenceSession(str(self.path), options, providers=providers)
        except Exception as error:  # onnxruntime raises a dozen unrelated types here
            raise RuntimeUnavailableError(f"{self.path.name} cannot be opened: {error}") from error

    @property
    def providers(self) -> list[str]:
        """The providers the session registered; see :meth:`placement` for what ran where."""
        return list(self._session.get_providers())

    def run(self, batch: Float) -> list[Float]:
        """Run ``batch`` (n, ...) and return every output with its rows in order: n of them, or where a network has no
        batch axis in its outputs, those of each input one after the other."""
        pieces = []
        for rows in cut(len(batch), self._sizes):
            piece = filled(batch[rows], self._sizes[0]) if self._is_fixed else batch[rows]
            outputs = [np.asarray(o) for o in self._session.run(self.output_names, {self.input_name: piece})]
            pieces.append([o[: len(batch[rows])] for o in outputs] if len(piece) > len(batch[rows]) else outputs)
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)]

    def placement(self, batch: Float) -> dict[str, int]:
        """Run once under the profiler; return how many nodes each provider really executed."""
        options = self._options()
        ran = nodes_run(options, lambda: self._open(self._session.get_providers(), options), batch)
        return dict(Counter(node.provider for node in ran))

    def operators_ms(self, batch: Float) -> dict[str, float]:
        """Milliseconds of one run of ``batch`` by operator, as onnxruntime's own profiler has them."""
        options = self._options()
        taken: dict[str, float] = {}
        for node in nodes_run(options, lambda: self._open(self._session.get_providers(), options), batch, warm=True):
            taken[node.operator] = taken.get(node.operator, 0.0) + node.ms
        return taken


@dataclass(frozen=True)
class NodeRun:
    """A node that ran: its operator, how long, and whether it gave numbers of the network rather than shapes."""

    provider: str
    operator: str
    computes: bool
    ms: float


def nodes_run(options: Any, open_session: Callable[[], Any], batch: Float, warm: bool = False) -> list[NodeRun]:
    """Open a session of ``options`` under the profiler, run it once, or twice where it shall be ``warm``, and return
    every node as it ran the last time."""
    with tempfile.TemporaryDirectory() as folder:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = open_session()
        for _ in range(1 + warm):
            session.run(None, {session.get_inputs()[0].name: batch})
        events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    ran = [
        NodeRun(
            e["args"]["provider"],
            e["args"].get("op_name", ""),
            _computes(e["args"].get("output_type_shape", [])),
            e["dur"] / 1000,
        )
        for e in events
        if e.get("cat") == "Node" and e["args"].get("provider")
    ]
    return ran[len(ran) // 2 :] if warm else ran


def _computes(outputs: list[dict[str, list[int]]]) -> bool:
    return any("float" in kind or kind == "double" for output in outputs for kind in output)

"""Choice of runtime, precision and device for each network of a pack."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Final, Literal

import numpy as np

from models.errors import ModelError, RuntimeUnavailableError
from models.runtime import onnx_runtime, openvino_network
from models.runtime.cuda_network import CUDA, CudaNetwork, Device, diagnose_cuda, visible_gpus
from models.runtime.dynamic_shapes import agrees, make_dynamic
from models.runtime.network import Engine, Float, Network, Precision, is_ir
from models.runtime.onnx_check import is_bundled
from models.runtime.onnx_runtime import CPU, OnnxNetwork, available_cores, is_gpu_build
from models.runtime.openvino_network import OpenVinoNetwork
from models.vision.detection import CANVAS_BUCKETS_PX
from models.vision.output_check import check_outputs
from models.vision.specs import DetectionSpec, NetworkSpec

log = logging.getLogger(__name__)

PrecisionsByEngine = Mapping[Engine, AbstractSet[Precision]]
"""Installed engines, preferred first, with fp32 and the precisions that are faster on this processor."""
DevicePreference = Literal["auto", "cpu", "gpu"]
PHOTO_BATCH_SIZES: Final = (1, 2, 4, 8)
"""Batch sizes of photos, which are much larger than crops."""
GPU_CROP_BATCH_SIZES: Final = (1, 8, 32)
GPU_CANVAS_SIDES_PX: Final = (CANVAS_BUCKETS_PX[0], CANVAS_BUCKETS_PX[-1])
"""Batch sizes and canvases on GPUs, where each shape takes seconds to open, and padding costs little."""
MAX_SHARES: Final = 8
"""Most shares of the cores. Each has two cores or more, if there are four, for the latency of a photo alone."""


@dataclass(frozen=True)
class EnginePreference:
    """Pinned settings; None chooses automatically.

    Args:
        provider: execution provider of onnxruntime.
        threads: threads per network.
        streams: as of OpenVinoNetwork; onnxruntime runs each network with all threads.
        device: "auto" uses GPUs if the GPU build of onnxruntime is installed and a GPU is visible.
    """

    engine: Engine | None = None
    precision: Precision | None = None
    provider: str | None = None
    threads: int | None = None
    streams: int = 1
    device: DevicePreference = "auto"

    @property
    def wants_gpu(self) -> bool:
        """Resolved choice between GPU and CPU. A pinned CPU engine wins unless the GPU is requested explicitly."""
        if self.device != "auto":
            return self.device == "gpu"
        pinned = self.engine == "openvino" or self.provider not in (None, CUDA)
        return not pinned and bool(visible_gpus()) and is_gpu_build()


CpuNetwork = OpenVinoNetwork | OnnxNetwork


RUNTIMES: Final[Mapping[Engine, ModuleType]] = {"openvino": openvino_network, "onnxruntime": onnx_runtime}
"""Modules of the runtimes on CPUs, preferred first."""


@dataclass(frozen=True, eq=False)
class OpenedNetworks:
    """One open network per device: a GPU, or a share of the cores. ``gpu_error`` explains a fallback to the CPU."""

    networks: Sequence[Network]
    gpu_error: str | None = None

    @property
    def photo_batch_sizes(self) -> Sequence[int]:
        """Sizes of batches of photos: one on a share of the cores, where batches are no faster."""
        shares = len(self.networks) > 1 and not isinstance(self.networks[0], CudaNetwork)
        return PHOTO_BATCH_SIZES[:1] if shares else PHOTO_BATCH_SIZES

    @property
    def crop_batch_sizes(self) -> Sequence[int]:
        """Sizes of batches of crops. Larger ones are no faster on a CPU, and delay other requests."""
        return GPU_CROP_BATCH_SIZES if isinstance(self.networks[0], CudaNetwork) else self.photo_batch_sizes

    @property
    def canvas_sides_px(self) -> Sequence[int]:
        """Sides of a detector's canvases on these devices."""
        return GPU_CANVAS_SIDES_PX if isinstance(self.networks[0], CudaNetwork) else CANVAS_BUCKETS_PX


@dataclass(frozen=True)
class EngineChoice:
    """Chosen engine and precision, with the reason."""

    engine: Engine
    precision: Precision
    reason: str


def open_networks(spec: NetworkSpec, preference: EnginePreference) -> OpenedNetworks:
    """Open the network on every GPU if GPUs are wanted, else on the CPU.

    GPU failures are reported in ``gpu_error``, and the network runs on the CPU: the service decides whether it serves.

    Raises:
        PackError: the service cannot use the network.
        RuntimeUnavailableError: a pinned setting is unavailable.
    """
    if not preference.wants_gpu:
        return OpenedNetworks(_on_shares(spec, preference))
    unsupported = preference.engine == "openvino" or preference.provider not in (None, CUDA)
    if unsupported or preference.precision not in (None, "fp32", "fp16"):
        raise RuntimeUnavailableError(
            "GPUs support only onnxruntime's CUDA in fp16 and fp32: unset KITH_RUNTIME, or set KITH_DEVICE to cpu"
        )
    try:
        networks = open_on_gpus(spec, half=preference.precision != "fp32")
        for network in networks:
            check_outputs(spec, network)
        return OpenedNetworks(networks)
    except ModelError as error:  # if the file is at fault, the CPU reports it
        log.error("%s runs on the CPU: %s", spec.path.name, error)
        return OpenedNetworks(_on_shares(spec, replace(preference, precision=None, provider=None)), str(error))


def _on_shares(spec: NetworkSpec, preference: EnginePreference) -> list[CpuNetwork]:
    """Open the network once, for as many shares of the cores as it runs on at once."""
    cores = preference.threads or available_cores()
    shares = min(cores, max(2, min(MAX_SHARES, cores // 2)))
    network = open_network(spec, replace(preference, streams=shares))
    return [network] * (network.streams if isinstance(network, OpenVinoNetwork) else 1)


def open_network(spec: NetworkSpec, preference: EnginePreference) -> CpuNetwork:
    """Open the network on the CPU or the pinned provider, check it, and warm it up.

    Raises:
        PackError: the service cannot use the network.
        RuntimeUnavailableError: a pinned setting is unavailable.
    """
    # A pinned engine is the only one imported: each library takes 15 to 20 MB.
    available = available_precisions("onnxruntime" if preference.provider is not None else preference.engine)
    choice = choose_engine(spec, preference, available)
    try:
        return _open_checked(spec, choice, preference)
    except ModelError as error:
        if choice.engine == "onnxruntime" or preference.engine is not None or "onnxruntime" not in available:
            raise
        if is_ir(spec.path):
            raise
        if preference.precision not in (None, *available["onnxruntime"]):
            raise  # onnxruntime would use another precision than the pinned one
        log.warning("%s", error)
        fallback = choose_engine(spec, preference, {"onnxruntime": available["onnxruntime"]})
        fallback = replace(fallback, reason=f"OpenVINO cannot run this file; {fallback.reason}")
        return _open_checked(spec, fallback, preference)


def _open_checked(spec: NetworkSpec, choice: EngineChoice, preference: EnginePreference) -> CpuNetwork:
    network = open_with_engine(spec, choice, preference)
    # Each shape of the check is compiled, and stays: 30 MB and a quarter of a second, which bundled networks save.
    check_outputs(spec, network, thorough=not is_bundled(network.path))
    return network


def open_with_engine(spec: NetworkSpec, choice: EngineChoice, preference: EnginePreference) -> CpuNetwork:
    """Open the network with the chosen engine and precision. Detectors of fixed shape are made dynamic if possible.

    Raises:
        PackError: the engine cannot open the file.
        RuntimeUnavailableError: the engine or the pinned provider is unavailable.
    """
    path = spec.int8.path if choice.precision == "int8" and spec.int8 is not None else spec.path
    network = _open_file(path, choice, preference)
    network.reason = choice.reason
    is_static = isinstance(spec, DetectionSpec) and network.is_static
    return _open_dynamic(network, choice, preference) if is_static else network


def _open_file(
    path: Path, choice: EngineChoice, preference: EnginePreference, graph: bytes | None = None
) -> CpuNetwork:
    """Open a file, or the ``graph`` made from it."""
    if choice.engine == "openvino":
        return OpenVinoNetwork(path, choice.precision, preference.threads, graph, preference.streams)
    return OnnxNetwork(path, preference.provider or CPU, preference.threads, choice.precision, graph)


def _open_dynamic(static: CpuNetwork, choice: EngineChoice, preference: EnginePreference) -> CpuNetwork:
    """Return the network for batches and canvases of any size if it equals the original, else the original."""
    try:
        if (graph := make_dynamic(static.path)) is None:
            return static
        dynamic = _open_file(static.path, choice, preference, graph)
        equal = agrees(static, dynamic)
    except Exception as error:  # runtimes raise many unrelated types for shapes that do not fit
        log.info("%s keeps its fixed shape: %s", static.path.name, error)
        return static
    if not equal:
        log.info("%s keeps its fixed shape: its outputs would change", static.path.name)
        return static
    dynamic.reason = f"{static.reason}; its fixed shape was opened".lstrip("; ")
    return dynamic


def open_fp32(path: Path, provider: str | None = None) -> CpuNetwork:
    """Open a network of a pack for measurements: with ONNX Runtime if its format permits, else with OpenVINO.

    Raises:
        PackError: the runtime cannot open the file.
        RuntimeUnavailableError: the runtime or the provider is unavailable.
    """
    return OpenVinoNetwork(path) if is_ir(path) else OnnxNetwork(path, provider)


def available_precisions(only: Engine | None = None) -> PrecisionsByEngine:
    """Return the precisions of the installed engines, or of one engine. Raises RuntimeUnavailableError."""
    available = {
        name: runtime.fast_precisions()
        for name, runtime in RUNTIMES.items()
        if only in (None, name) and find_spec(name) is not None
    }
    if not available:
        missing = "no runtime is" if only is None else f"{only} is not"
        raise RuntimeUnavailableError(f"{missing} installed: install the distribution with its 'cpu' or 'gpu' extra")
    return available


def choose_engine(spec: NetworkSpec, preference: EnginePreference, available: PrecisionsByEngine) -> EngineChoice:
    """Choose engine and precision of a network.

    Raises:
        RuntimeUnavailableError: a pinned setting is not installed, or the processor lacks it.
    """
    if preference.provider is not None and preference.engine == "openvino":
        raise RuntimeUnavailableError(
            f"KITH_RUNTIME names openvino, which has no {preference.provider}: remove one of them"
        )
    if is_ir(spec.path):
        if "openvino" not in available or preference.provider is not None:
            raise RuntimeUnavailableError(
                f"only OpenVINO runs {spec.path.name}: install it with the 'cpu' extra and unset KITH_RUNTIME, or "
                "choose another pack"
            )
        available = {"openvino": available["openvino"]}
    default: Engine = "onnxruntime" if preference.provider is not None else next(iter(available))
    engine = default if preference.engine is None else preference.engine
    if engine not in available:
        raise RuntimeUnavailableError(f"{engine} is not installed; installed: {', '.join(available)}")
    precisions, pinned = available[engine], preference.precision
    # A pack may have INT8 for only one of its networks.
    if pinned is not None and (pinned != "int8" or spec.int8 is not None):
        supported = RUNTIMES[engine].supported_precisions() | precisions
        if pinned not in supported:
            listed = ", ".join(sorted(supported))
            raise RuntimeUnavailableError(f"{engine} has no {pinned} on this processor; it has {listed} (KITH_RUNTIME)")
        return EngineChoice(engine, pinned, "pinned")
    if pinned is not None:
        no_int8 = "INT8 is pinned, but the pack has no INT8 of this network"
    elif "int8" not in precisions:
        no_int8 = "this processor has no fast INT8"
    elif spec.int8 is None:
        no_int8 = "the pack has no INT8"
    elif not spec.int8.is_accurate(engine):
        no_int8 = "the loss of the pack's INT8 is above the limit or unknown"
    else:
        return EngineChoice(engine, "int8", "the pack has INT8 with a loss within the limits")
    if "bf16" not in precisions:
        return EngineChoice(engine, "fp32", f"{no_int8}, and {engine} has no faster bf16 here")
    return EngineChoice(engine, "bf16", f"{no_int8}; this processor has fast bf16")


def open_on_gpus(spec: NetworkSpec, half: bool = True) -> list[CudaNetwork]:
    """Open the network on each visible GPU, with all its input shapes prepared.

    Raises:
        RuntimeUnavailableError: there is no usable GPU, or :func:`open_on_device` failed on one.
    """
    if (problem := diagnose_cuda()) is not None:
        raise RuntimeUnavailableError(problem)
    devices = [Device("cuda", index) for index in range(len(visible_gpus()))]
    return [open_on_device(spec, device, half) for device in devices]


def open_on_device(spec: NetworkSpec, device: Device, half: bool = True) -> CudaNetwork:
    """Open the network on one device.

    Raises:
        RuntimeUnavailableError: the device cannot start, its results differ from the CPU, or it left nodes to the CPU.
    """
    shapes = input_shapes(spec)
    network = CudaNetwork(spec.path, shapes, make_probe(spec, shapes), device, half)
    if network.cpu_nodes:
        listed = ", ".join(f"{count} {operator}" for operator, count in sorted(network.cpu_nodes.items()))
        raise RuntimeUnavailableError(f"{spec.path.name}: some nodes ran on the CPU instead of the GPU: {listed}")
    return network


def input_shapes(spec: NetworkSpec) -> list[tuple[int, ...]]:
    """Return every (n, 3, height, width) that the service uses on a GPU. Raises RuntimeUnavailableError: the file is
    invalid."""
    batch, _, height, width = OnnxNetwork(spec.path, CPU).input_shape
    sizes: tuple[int, ...]
    sides: list[tuple[int, int]]
    if not isinstance(spec, DetectionSpec):
        sizes, sides = GPU_CROP_BATCH_SIZES, [spec.shape]
    elif isinstance(height, int) and isinstance(width, int):
        sizes, sides = PHOTO_BATCH_SIZES, [(height, width)]
    else:
        sizes, sides = PHOTO_BATCH_SIZES, list(product(GPU_CANVAS_SIDES_PX, GPU_CANVAS_SIDES_PX))
    if isinstance(batch, int):
        sizes = (batch,)
    return [(size, 3, *side) for size in sizes for side in sides]


def make_probe(spec: NetworkSpec, shapes: Sequence[tuple[int, ...]]) -> Float:
    """Return normalized random pixels of the smallest shape."""
    pixels = np.random.default_rng(0).integers(0, 256, min(shapes)).astype(np.float32)
    return np.asarray((pixels - spec.normalization.mean) / spec.normalization.std, np.float32)

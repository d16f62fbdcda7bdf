"""Networks on GPUs: device choice, prepared shapes, one network per GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final, Literal

import numpy as np

from models.errors import RuntimeUnavailableError
from models.runtime.cuda import diagnose_cuda, visible_gpus
from models.runtime.cuda_network import CudaNetwork, Device
from models.runtime.network import Float
from models.runtime.onnx_runtime import BATCH_BUCKETS, OnnxNetwork, is_gpu_build
from models.vision.detection import CANVAS_BUCKETS_PX
from models.vision.specs import DetectionSpec, NetworkSpec

DevicePreference = Literal["auto", "cpu", "gpu"]
PHOTO_BATCH_SIZES: Final = (1, 2, 4, 8)
"""Batch sizes of photos, which are much larger than crops."""


@dataclass(frozen=True)
class GpuPreference:
    """GPU settings.

    Args:
        device: "auto" uses GPUs if the GPU build of onnxruntime is installed and a GPU is visible.
        indices: GPUs to use; None uses all.
        folder: cache of files made for the GPUs.
        half: use fp16 if it agrees with fp32.
    """

    device: DevicePreference = "auto"
    indices: tuple[int, ...] | None = None
    folder: Path = Path("data/networks")
    half: bool = True

    @property
    def wants_gpu(self) -> bool:
        """Resolved choice between GPU and CPU."""
        if self.device == "auto":
            return bool(visible_gpus()) and is_gpu_build()
        return self.device == "gpu"


def open_on_gpus(spec: NetworkSpec, preference: GpuPreference) -> list[CudaNetwork]:
    """Open the network on each GPU, with all its input shapes prepared.

    Raises:
        RuntimeUnavailableError: a GPU is missing, or :func:`open_on_device` failed on it.
    """
    if (problem := diagnose_cuda()) is not None:
        raise RuntimeUnavailableError(problem)
    visible = range(len(visible_gpus()))
    indices = tuple(visible) if preference.indices is None else preference.indices
    if missing := set(indices) - set(visible):
        raise RuntimeUnavailableError(f"GPU {min(missing)} is not visible: there are {len(visible)}, counted from 0")
    return [open_on_device(spec, Device("cuda", index), preference.folder, preference.half) for index in indices]


def open_on_device(spec: NetworkSpec, device: Device, folder: Path, half: bool = True) -> CudaNetwork:
    """Open the network on one device.

    Raises:
        RuntimeUnavailableError: the device cannot start, its results differ from the CPU, or it left nodes to the CPU.
    """
    shapes = input_shapes(spec)
    network = CudaNetwork(spec.path, shapes, make_probe(spec, shapes), folder, device, half)
    if network.cpu_nodes:
        listed = ", ".join(f"{count} {operator}" for operator, count in sorted(network.cpu_nodes.items()))
        raise RuntimeUnavailableError(f"{spec.path.name}: some nodes ran on the CPU instead of the GPU: {listed}")
    return network


def input_shapes(spec: NetworkSpec) -> list[tuple[int, ...]]:
    """Return every (n, 3, height, width) that the service uses. Raises RuntimeUnavailableError for invalid files."""
    batch, _, height, width = OnnxNetwork(spec.path, "CPUExecutionProvider").input_shape
    sizes: tuple[int, ...]
    sides: list[tuple[int, int]]
    if not isinstance(spec, DetectionSpec):
        sizes, sides = BATCH_BUCKETS, [spec.shape]
    elif isinstance(height, int) and isinstance(width, int):
        sizes, sides = PHOTO_BATCH_SIZES, [(height, width)]
    else:
        sizes, sides = PHOTO_BATCH_SIZES, list(product(CANVAS_BUCKETS_PX, CANVAS_BUCKETS_PX))
    if isinstance(batch, int):
        sizes = (batch,)
    return [(size, 3, *side) for size in sizes for side in sides]


def make_probe(spec: NetworkSpec, shapes: Sequence[tuple[int, ...]]) -> Float:
    """Return normalized random pixels of the smallest shape."""
    pixels = np.random.default_rng(0).integers(0, 256, min(shapes)).astype(np.float32)
    return np.asarray((pixels - spec.normalization.mean) / spec.normalization.std, np.float32)

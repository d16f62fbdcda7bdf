"""A pack's networks on GPUs: whether they are wanted there, which shapes they will meet, one network a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final, Literal

import numpy as np

from models.cuda import visible_gpus, why_not_cuda
from models.cuda_network import BEST, CudaNetwork, Device, Numbers
from models.detection import CANVAS_BUCKETS_PX
from models.errors import RuntimeUnavailableError
from models.network import Float
from models.pack import DetectionSpec, LivenessSpec, RecognitionSpec
from models.runtime import BATCH_BUCKETS, OnnxNetwork, is_gpu_build

Where = Literal["auto", "cpu", "gpu"]
PHOTO_BATCHES: Final = (1, 2, 4, 8)
"""A batch of photos is larger than one of crops by far."""


@dataclass(frozen=True)
class GpuWish:
    """``where``: "auto" is the GPU, if onnxruntime's GPU build is installed and sees one. ``indices``: of GPUs; None is
    all. ``folder``: for files made for them. ``half``: fp16 where it agrees with fp32."""

    where: Where = "auto"
    indices: tuple[int, ...] | None = None
    folder: Path = Path("data/networks")
    half: bool = True

    @property
    def wants_gpu(self) -> bool:
        if self.where == "auto":
            return bool(visible_gpus()) and is_gpu_build()
        return self.where == "gpu"


def open_on_gpus(spec: DetectionSpec | RecognitionSpec | LivenessSpec, wish: GpuWish) -> list[CudaNetwork]:
    """The network once on each GPU, every shape it will meet prepared.

    Raises:
        RuntimeUnavailableError: one of the GPUs is not there, cannot start, gives other results than the CPU, or left
            nodes to the CPU; says which and why.
    """
    if (trouble := why_not_cuda()) is not None:
        raise RuntimeUnavailableError(trouble)
    there = range(len(visible_gpus()))
    indices = tuple(there) if wish.indices is None else wish.indices
    if absent := set(indices) - set(there):
        raise RuntimeUnavailableError(f"no GPU {min(absent)} is visible: there are {len(there)}, counted from 0")
    return [open_on(spec, Device("cuda", index), wish.folder, Numbers(half=wish.half)) for index in indices]


def open_on(
    spec: DetectionSpec | RecognitionSpec | LivenessSpec, device: Device, folder: Path, numbers: Numbers = BEST
) -> CudaNetwork:
    """On one device.

    Raises:
        RuntimeUnavailableError: it cannot start, gives other results than the CPU, or left nodes to the CPU.
    """
    shapes = shapes_of(spec)
    network = CudaNetwork(spec.path, shapes, probe_of(spec, shapes), folder, device, numbers)
    if network.strays:
        listed = ", ".join(f"{count} {operator}" for operator, count in sorted(network.strays.items()))
        raise RuntimeUnavailableError(f"{spec.path.name}: nodes ran on the CPU that belong on the GPU: {listed}")
    return network


def shapes_of(spec: DetectionSpec | RecognitionSpec | LivenessSpec) -> list[tuple[int, ...]]:
    """Every (n, 3, height, width) that a service feeds the network. Raises RuntimeUnavailableError: it is none."""
    batch, _, height, width = OnnxNetwork(spec.path, "CPUExecutionProvider").input_shape
    sizes: tuple[int, ...]
    sides: list[tuple[int, int]]
    if not isinstance(spec, DetectionSpec):
        sizes, sides = BATCH_BUCKETS, [(spec.alignment.size_px, spec.alignment.size_px)]
    elif isinstance(height, int) and isinstance(width, int):
        sizes, sides = PHOTO_BATCHES, [(height, width)]
    else:
        sizes, sides = PHOTO_BATCHES, list(product(CANVAS_BUCKETS_PX, CANVAS_BUCKETS_PX))
    if isinstance(batch, int):
        sizes = (batch,)
    return [(size, 3, *side) for size in sizes for side in sides]


def probe_of(spec: DetectionSpec | RecognitionSpec | LivenessSpec, shapes: Sequence[tuple[int, ...]]) -> Float:
    """One input of the smallest shape: noise in the range of pixels, normalised."""
    pixels = np.random.default_rng(0).integers(0, 256, min(shapes)).astype(np.float32)
    return np.asarray((pixels - spec.normalisation.mean) / spec.normalisation.std, np.float32)

"""Which runtime runs a pack's networks, and in which numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from models import openvino_network, runtime
from models.cuda import CUDA, TENSORRT
from models.detection import CANVAS_BUCKETS_PX
from models.errors import PackError, RuntimeUnavailableError
from models.gpus import GpuWish, open_on_gpus
from models.network import Engine, Network, Precision
from models.openvino_network import OpenVinoNetwork
from models.pack import DetectionSpec, LivenessSpec, RecognitionSpec
from models.runtime import OnnxNetwork

MAX_POINTS_LOST: Final = 0.1
"""Of accuracy or recall: what numbers may cost that are chosen here. Pinned ones may cost more."""
WARM_BATCH: Final = 5
"""Runs a piece of each size that batches are cut into where networks are small."""
CPU: Final = "CPUExecutionProvider"
log = logging.getLogger(__name__)

Spec = DetectionSpec | RecognitionSpec | LivenessSpec
Abilities = Mapping[Engine, AbstractSet[Precision]]
"""By engine that is installed, preferred first: the numbers that it computes faster than fp32 here, and fp32."""


@dataclass(frozen=True)
class Wish:
    """What is pinned; None: chosen here. ``provider``: of onnxruntime. ``threads``: per network."""

    engine: Engine | None = None
    precision: Precision | None = None
    provider: str | None = None
    threads: int | None = None
    gpu: GpuWish = field(default_factory=GpuWish)

    @property
    def wants_gpu(self) -> bool:
        """Whoever pins what only a CPU has wants none, unless they ask for it."""
        pinned = self.engine == "openvino" or self.provider not in (None, CUDA, TENSORRT)
        return self.gpu.wants_gpu and (self.gpu.where == "gpu" or not pinned)


@dataclass(frozen=True, eq=False)
class Opened:
    """A network on each device that runs it. ``shortfall``: why none of them is the GPU that was wanted."""

    networks: Sequence[Network]
    shortfall: str | None = None


def open_networks(spec: Spec, wish: Wish) -> Opened:
    """On every GPU where GPUs are wanted, else on the CPU. What the GPUs lack is said, not raised: whether it goes on
    without them is for the service to say.

    Raises:
        RuntimeUnavailableError: what is pinned cannot run here, or the file is no network.
    """
    if not wish.wants_gpu:
        return Opened([open_network(spec, wish)])
    if wish.engine == "openvino" or wish.precision not in (None, "fp32", "fp16"):
        raise RuntimeUnavailableError(
            "GPUs have onnxruntime, in fp16 and fp32: unset KITH_ENGINE and KITH_PRECISION, or set KITH_DEVICE to cpu"
        )
    try:
        return Opened(open_on_gpus(spec, replace(wish.gpu, half=wish.precision != "fp32")))
    except RuntimeUnavailableError as error:
        log.error("%s runs on the CPU: %s", spec.path.name, error)
        return Opened([open_network(spec, replace(wish, precision=None, provider=None))], str(error))


@dataclass(frozen=True)
class Choice:
    engine: Engine
    precision: Precision
    why: str


def open_network(spec: Spec, wish: Wish) -> Network:
    """On the CPU, unless another provider is pinned. Run once on what it will usually meet; other canvases than the
    smallest are compiled when a photo needs them.

    Raises:
        RuntimeUnavailableError: what is pinned cannot run here, or the file is no network.
        PackError: the file is not the recogniser that the manifest describes.
    """
    # What is not asked for is not imported: each library costs 15 to 20 MB.
    able = abilities("onnxruntime" if wish.provider is not None else wish.engine)
    choice = choose(spec, wish, able)
    try:
        return _open_warm(spec, choice, wish)
    except RuntimeUnavailableError as error:
        if choice.engine == "onnxruntime" or wish.engine is not None or "onnxruntime" not in able:
            raise
        if wish.precision not in (None, *able["onnxruntime"]):
            raise  # onnxruntime would run it in other numbers than those pinned
        log.warning("%s", error)
        instead = choose(spec, wish, {"onnxruntime": able["onnxruntime"]})
        return _open_warm(spec, replace(instead, why=f"OpenVINO cannot run this file; {instead.why}"), wish)


def _open_warm(spec: Spec, choice: Choice, wish: Wish) -> Network:
    network = open_chosen(spec, choice, wish)
    first = network.run(np.zeros((WARM_BATCH, *usual_shape(spec, network)), np.float32))[0]
    # A variant's file is another file: what tells the tasks apart is looked at here, how many outputs a detector has
    # where they are read.
    if isinstance(spec, RecognitionSpec) and first.size != WARM_BATCH * spec.dimension:
        given = first.size // WARM_BATCH
        raise PackError(
            "tasks.recognition.embedding_dimension", f"is {spec.dimension}, {network.path.name} gives {given}"
        )
    return network


def usual_shape(spec: Spec, network: Network) -> tuple[int, int, int]:
    """Of one input: a crop, or the photo on a detector's smallest canvas."""
    side = CANVAS_BUCKETS_PX[0] if isinstance(spec, DetectionSpec) else spec.alignment.size_px
    height, width = (fixed if isinstance(fixed, int) else side for fixed in network.input_shape[2:])
    return 3, height, width


def open_chosen(spec: Spec, choice: Choice, wish: Wish) -> Network:
    """Raises RuntimeUnavailableError."""
    variant = next((v for v in spec.variants if v.precision == choice.precision), None)
    path = spec.path if variant is None or variant.path is None else variant.path
    network: Network
    if choice.engine == "openvino":
        network = OpenVinoNetwork(path, choice.precision, wish.threads)
    else:
        network = OnnxNetwork(path, wish.provider or CPU, wish.threads, choice.precision)
    network.why = choice.why
    return network


def abilities(only: Engine | None = None) -> Abilities:
    """What is installed of all or of one engine, on this processor. Raises RuntimeUnavailableError: nothing is."""
    found: dict[Engine, AbstractSet[Precision]] = {}
    if only != "onnxruntime" and openvino_network.is_installed():
        found["openvino"] = openvino_network.fast_precisions()
    if only != "openvino" and runtime.is_installed():
        onnxruntime: set[Precision] = {"fp32", "int8"} if runtime.has_fast_int8() else {"fp32"}
        found = {**found, "onnxruntime": onnxruntime}
    if not found:
        missing = "neither openvino nor onnxruntime is" if only is None else f"{only} is not"
        raise RuntimeUnavailableError(f"{missing} installed: install the distribution with its 'cpu' or 'gpu' extra")
    return found


def choose(spec: Spec, wish: Wish, able: Abilities) -> Choice:
    """The engine and the numbers for a network, and why.

    Raises:
        RuntimeUnavailableError: what is pinned is not installed, or this processor lacks it.
    """
    if wish.provider is not None and wish.engine == "openvino":
        raise RuntimeUnavailableError("KITH_PROVIDER is onnxruntime's, KITH_ENGINE names openvino: unset one of them")
    preferred: Engine = "onnxruntime" if wish.provider is not None else next(iter(able))
    engine = preferred if wish.engine is None else wish.engine
    if engine not in able:
        raise RuntimeUnavailableError(f"{engine} is not installed; installed: {', '.join(able)}")
    if wish.precision is not None:
        return _pinned(spec, wish.precision, engine, able[engine])
    for variant in spec.variants:
        if variant.precision == "int8" and "int8" in able[engine]:
            if variant.points_lost is not None and variant.points_lost <= MAX_POINTS_LOST:
                why = f"the pack has it, and measured a loss of {variant.points_lost:g} points"
                if (felt := variant.felt_in_galleries(engine)) is not None:
                    why += f"; {felt}" + (" (KITH_PRECISION=bf16 loses less)" if "bf16" in able[engine] else "")
                return Choice(engine, "int8", why)
            return _floating(spec, engine, able[engine], "the pack's INT8 loses more than 0.1 points, or nobody knows")
    lacks = "this processor has no fast INT8" if "int8" not in able[engine] else "the pack has no INT8"
    return _floating(spec, engine, able[engine], lacks)


def _pinned(spec: Spec, precision: Precision, engine: Engine, able: AbstractSet[Precision]) -> Choice:
    if precision == "int8" and not any(v.precision == "int8" for v in spec.variants):
        # Else a pack of one INT8 network could not be pinned to it.
        return _floating(spec, engine, able, "INT8 is pinned, but the pack has none of this network")
    if precision not in able and precision != "int8":
        raise RuntimeUnavailableError(
            f"{engine} has no {precision} on this processor; it has {', '.join(sorted(able))} (KITH_PRECISION)"
        )
    return Choice(engine, precision, "pinned")


def _floating(spec: Spec, engine: Engine, able: AbstractSet[Precision], lacks: str) -> Choice:
    if "bf16" not in able:
        return Choice(engine, "fp32", f"{lacks}, and {engine} no bf16 here")
    lost = next((v.points_lost for v in spec.variants if v.precision == "bf16"), None)
    if lost is not None and lost > MAX_POINTS_LOST:
        return Choice(engine, "fp32", f"{lacks}, and bf16 loses {lost:g} points")
    return Choice(engine, "bf16", f"{lacks}; this processor multiplies bf16")

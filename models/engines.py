"""Which runtime runs a pack's networks, and in which numbers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from models.errors import RuntimeUnavailableError
from models.gpus import GpuWish, open_on_gpus
from models.network import Network
from models.pack import DetectionSpec, RecognitionSpec
from models.runtime import OnnxNetwork

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wish:
    """What is pinned; None: chosen here. ``provider``: of onnxruntime. ``threads``: per network."""

    provider: str | None = None
    threads: int | None = None
    gpu: GpuWish = field(default_factory=GpuWish)


@dataclass(frozen=True, eq=False)
class Opened:
    """A network on each device that runs it. ``shortfall``: why none of them is the GPU that was wanted."""

    networks: Sequence[Network]
    shortfall: str | None = None


def open_networks(spec: DetectionSpec | RecognitionSpec, wish: Wish) -> Opened:
    """On every GPU where GPUs are wanted, else on the CPU. What the GPUs lack is said, not raised: whether it goes on
    without them is for the service to say.

    Raises:
        RuntimeUnavailableError: what is pinned cannot run here, or the file is no network.
    """
    if not wish.gpu.wants_gpu:
        return Opened([open_network(spec, wish)])
    try:
        return Opened(open_on_gpus(spec, wish.gpu))
    except RuntimeUnavailableError as error:
        log.error("%s runs on the CPU: %s", spec.path.name, error)
        return Opened([open_network(spec, wish)], str(error))


def open_network(spec: DetectionSpec | RecognitionSpec, wish: Wish) -> Network:
    """Raises RuntimeUnavailableError: what is pinned cannot run here, or the file is no network."""
    return OnnxNetwork(spec.path, wish.provider, wish.threads)

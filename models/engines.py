"""Which runtime runs a pack's networks, and in which numbers."""

from __future__ import annotations

from dataclasses import dataclass

from models.network import Network
from models.pack import DetectionSpec, RecognitionSpec
from models.runtime import OnnxNetwork


@dataclass(frozen=True)
class Wish:
    """What is pinned; None: chosen here. ``provider``: of onnxruntime. ``threads``: per network."""

    provider: str | None = None
    threads: int | None = None


def open_network(spec: DetectionSpec | RecognitionSpec, wish: Wish) -> Network:
    """Raises RuntimeUnavailableError: what is pinned cannot run here, or the file is no network."""
    return OnnxNetwork(spec.path, wish.provider, wish.threads)

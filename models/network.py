"""What a runtime gives: a pack's network, opened, whatever runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Engine = Literal["onnxruntime", "openvino"]
Precision = Literal["fp32", "bf16", "fp16", "int8"]
"""The numbers that the bulk of a network's layers multiply."""


class Network(Protocol):
    """One network, ready to run from one thread at a time. ``why`` this engine and these numbers, in words."""

    path: Path
    engine: Engine
    why: str
    input_shape: tuple[int | str | None, ...]
    output_names: list[str]

    @property
    def precision(self) -> Precision:
        """What the bulk of it is computed in."""

    @property
    def providers(self) -> list[str]:
        """What may run its nodes, first choice first."""

    def run(self, batch: Float) -> list[Float]:
        """Run ``batch`` (n, ...) and return every output with its rows in order: n of them, or where a network has no
        batch axis in its outputs, those of each input one after the other."""

    def placement(self, batch: Float) -> dict[str, int]:
        """Run ``batch`` once; return how many nodes ran on which provider or in which numbers."""

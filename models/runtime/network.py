"""Common interface of the networks that the runtimes open."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Engine = Literal["onnxruntime", "openvino"]
Precision = Literal["fp32", "bf16", "fp16", "int8"]


class Network(Protocol):
    """Open network for use by one thread at a time. ``reason`` explains the choice of engine and precision."""

    path: Path
    engine: Engine
    reason: str
    input_shape: tuple[int | str | None, ...]
    output_names: list[str]

    @property
    def precision(self) -> Precision:
        """Precision of most of the arithmetic."""

    @property
    def providers(self) -> list[str]:
        """Providers that may run the nodes, in order of preference."""

    def run(self, batch: Float) -> list[Float]:
        """Run ``batch`` (n, ...) and return all outputs, rows in input order.

        Outputs have n rows. Outputs without a batch axis hold the rows of each input one after the other.
        """

    def placement(self, batch: Float) -> dict[str, int]:
        """Run ``batch`` once and return the number of nodes by provider or precision."""

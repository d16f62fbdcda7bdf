"""Common interface of the networks that the runtimes open."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from models.errors import PackError

Float = NDArray[np.float32]
Engine = Literal["onnxruntime", "openvino"]
Precision = Literal["fp32", "bf16", "fp16", "int8"]
InputType = type[np.float32] | type[np.float16] | type[np.float64]
INPUT_TYPES: Final[dict[str, InputType]] = {
    **dict.fromkeys(("tensor(float)", "f32"), np.float32),
    **dict.fromkeys(("tensor(float16)", "f16"), np.float16),
    **dict.fromkeys(("tensor(double)", "f64"), np.float64),
}
"""Element types of inputs that float32 batches are cast to, by their names in onnxruntime and OpenVINO."""
IR_SUFFIX: Final = ".xml"
"""Suffix of a network in OpenVINO's format, whose weights lie beside it in a .bin of its name."""


def is_ir(path: Path) -> bool:
    """Tell whether a network is in OpenVINO's format, which only OpenVINO runs."""
    return path.suffix.lower() == IR_SUFFIX


def weights_file(path: Path) -> Path:
    """Return the file that holds a network's weights."""
    return path.with_suffix(".bin") if is_ir(path) else path


def read_network(path: Path) -> bytes:
    """Return a network's content; of OpenVINO's format, the .xml followed by the .bin."""
    return path.read_bytes() + (weights_file(path).read_bytes() if is_ir(path) else b"")


def network_sha256(path: Path) -> str:
    """Return the SHA-256 of :func:`read_network` in lower-case hexadecimal."""
    return hashlib.sha256(read_network(path)).hexdigest()


def input_type(name: str, path: Path) -> InputType:
    """Return the element type of a network's input by the runtime's ``name`` of it.

    Raises:
        PackError: float32 cannot be cast to the type without loss of meaning, as to bytes.
    """
    if name not in INPUT_TYPES:
        raise PackError(path.name, f"takes an input of type {name}: export it with a float32 or float16 input")
    return INPUT_TYPES[name]


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
        """Run ``batch`` (n, ...) and return all outputs as float32, rows in input order.

        Outputs have n rows. Outputs without a batch axis hold the rows of each input one after the other.
        """

"""Check of opened networks at start: input format, output shapes and finite outputs."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.errors import ModelError, PackError, summarize
from models.runtime.network import Network
from models.vision.detection import CANVAS_BUCKETS_PX, Detector
from models.vision.liveness import LivenessClassifier
from models.vision.recognition import Recognizer
from models.vision.specs import DetectionSpec, NetworkSpec, RecognitionSpec

CHECK_BATCH: Final = 5
"""Batch that small networks split into every batch size, so that the check also warms up the network."""


def check_outputs(spec: NetworkSpec, network: Network, thorough: bool = True) -> None:
    """Run a network on random images as the service does. Uniform images give a zero vector in some networks.

    Args:
        thorough: run batches and the extreme canvas, too, not only one small image.

    Raises:
        PackError: the service cannot use the network.
        RuntimeUnavailableError: the engine cannot run the network.
    """
    count = CHECK_BATCH if thorough else 1
    try:
        _check_input(spec, network)
        if isinstance(spec, DetectionSpec):
            _check_detector(Detector(network, spec), network, thorough)
        elif isinstance(spec, RecognitionSpec):
            Recognizer(network, spec).embed(_noise(count, *spec.shape))
        else:
            LivenessClassifier(network, spec).scores(_noise(count, *spec.shape))
    except ModelError:
        raise
    except Exception as error:  # runtimes raise many unrelated types
        raise PackError(
            network.path.name, f"cannot be used in {network.precision} on {network.engine}: {summarize(error)}"
        ) from error


def _check_input(spec: NetworkSpec, network: Network) -> None:
    shape, name = network.input_shape, network.path.name
    declared = ", ".join("?" if side is None else str(side) for side in shape)
    if len(shape) != 4 or (isinstance(shape[1], int) and shape[1] != 3):
        raise PackError(name, f"has an input of ({declared}): export it with (batch, 3, height, width)")
    if isinstance(spec, DetectionSpec):
        return
    height, width = spec.shape
    if any(isinstance(fixed, int) and fixed != side for fixed, side in zip(shape[2:], spec.shape, strict=True)):
        raise PackError(
            name, f"has an input of ({declared}), but the pack's crops are {width}x{height}: correct input_size"
        )


def _check_detector(detector: Detector, network: Network, thorough: bool) -> None:
    small, wide = CANVAS_BUCKETS_PX[0], CANVAS_BUCKETS_PX[-1]  # also prepared on GPUs
    every = ((CHECK_BATCH, small, small), (1, small, wide))
    for count, height, width in every if thorough else ((1, small, small),):
        photos = [detector.prepare(image) for image in _noise(count, height, width)]
        for photo, outputs in zip(photos, detector.run(photos), strict=True):
            expected = detector.output_shapes(photo.canvas)
            for number, (output, shape) in enumerate(zip(outputs, expected, strict=True)):
                if output.shape != shape:
                    raise PackError(
                        network.path.name,
                        f"returns {output.shape} as output {number} for an input of {photo.planes.shape}; the "
                        f"pack's head needs {shape}",
                    )
                if not np.isfinite(output).all():
                    raise PackError(
                        network.path.name,
                        f"returns numbers that are not finite in {network.precision} on {network.engine}",
                    )
            detector.decode_faces(photo, outputs)


def _noise(count: int, height: int, width: int) -> NDArray[np.uint8]:
    """Return random (count, height, width, 3) images."""
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)

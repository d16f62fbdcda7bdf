"""Aligned crops to unit embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.errors import PackError
from models.network import Float, Network
from models.pack import RecognitionSpec
from models.pixels import to_planes


def unit(vectors: NDArray[np.floating]) -> Float:
    """Scale each row of (n, d) to length 1.

    Raises:
        ValueError: a row is not finite or has no direction.
    """
    wide = np.asarray(vectors, np.float64)
    with np.errstate(over="ignore"):  # what is too long is infinitely long, and refused
        norms = np.linalg.norm(wide, axis=-1, keepdims=True)
    if not np.isfinite(norms).all() or (norms < 1e-12).any():
        raise ValueError("an embedding must be finite and must not be zero")
    return np.asarray(wide / norms, np.float32)


class Recogniser:
    """A recogniser of a pack, ready to run; ``alignment`` says how its crops are cut.

    Raises:
        PackError: the network's output is not what the manifest declares.
    """

    def __init__(self, network: Network, spec: RecognitionSpec) -> None:
        self._network = network
        self._normalisation = spec.normalisation
        self.alignment = spec.alignment
        self.dimension = spec.dimension
        self.fingerprint = spec.fingerprint()
        if len(network.output_names) != 1:
            raise PackError("tasks.recognition.file", "a recogniser has exactly one output")

    def embed(self, crops: NDArray[np.uint8]) -> Float:
        """(n, size_px, size_px, 3) uint8 RGB crops, cut by its own alignment, to (n, d) float32 of unit norm; n may
        be 0.

        Raises:
            ValueError: crops of another size.
        """
        if not len(crops):
            return np.empty((0, self.dimension), np.float32)
        side = self.alignment.size_px
        if crops.shape[1:] != (side, side, 3):
            raise ValueError(f"crops must have shape (n, {side}, {side}, 3), not {crops.shape}")
        batch = to_planes(crops, self._normalisation, np.empty((len(crops), 3, side, side), np.float32))
        vectors = self._network.run(batch)[0].reshape(len(crops), -1)
        if vectors.shape[1] != self.dimension:
            raise PackError(
                "tasks.recognition.embedding_dimension", f"is {self.dimension}, the network gives {vectors.shape[1]}"
            )
        return unit(vectors)

    def embed_each(self, crops: Sequence[NDArray[np.uint8]]) -> list[Float]:
        """A list of (size_px, size_px, 3) crops to a list of (d,) unit vectors, in one batch."""
        return list(self.embed(np.stack(crops)))

"""Face recognition: aligned crops to embeddings of unit length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.errors import PackError
from models.runtime.network import Float, Network
from models.vision.pixels import to_planes
from models.vision.specs import RecognitionSpec


def l2_normalize(vectors: NDArray[np.floating]) -> Float:
    """Scale each row of (n, d) vectors to length 1.

    Raises:
        ValueError: a row is zero or not finite.
    """
    wide = np.asarray(vectors, np.float64)
    with np.errstate(over="ignore"):  # overflow gives infinity, which is rejected
        norms = np.linalg.norm(wide, axis=-1, keepdims=True)
    if not np.isfinite(norms).all() or (norms < 1e-12).any():
        raise ValueError("an embedding must be finite and must not be zero")
    return np.asarray(wide / norms, np.float32)


class Recognizer:
    """Recognition network of a pack. ``alignment`` defines its crops.

    Raises:
        PackError: the network does not have exactly one output.
    """

    def __init__(self, network: Network, spec: RecognitionSpec) -> None:
        self._network = network
        self._normalization = spec.normalization
        self.alignment = spec.alignment
        self.dimension = spec.dimension
        self.fingerprint = spec.fingerprint()
        if len(network.output_names) != 1:
            raise PackError("tasks.recognition.file", "a recognizer must have exactly one output")

    def embed(self, crops: NDArray[np.uint8]) -> Float:
        """Return (n, d) float32 embeddings of unit length.

        Args:
            crops: (n, size_px, size_px, 3) uint8 RGB, cut with ``alignment``; n may be 0.

        Raises:
            ValueError: the crops have another size.
            PackError: the network's dimension differs from the manifest.
        """
        if not len(crops):
            return np.empty((0, self.dimension), np.float32)
        side = self.alignment.size_px
        if crops.shape[1:] != (side, side, 3):
            raise ValueError(f"crops must have shape (n, {side}, {side}, 3), not {crops.shape}")
        batch = to_planes(crops, self._normalization, np.empty((len(crops), 3, side, side), np.float32))
        vectors = self._network.run(batch)[0].reshape(len(crops), -1)
        if vectors.shape[1] != self.dimension:
            raise PackError(
                "tasks.recognition.embedding_dimension", f"is {self.dimension}, the network returns {vectors.shape[1]}"
            )
        return l2_normalize(vectors)

    def embed_each(self, crops: Sequence[NDArray[np.uint8]]) -> list[Float]:
        """Return the (d,) embeddings of a list of (size_px, size_px, 3) crops, in one batch."""
        return list(self.embed(np.stack(crops)))

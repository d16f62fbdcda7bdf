"""The recognisers that are served: each pack's own, with what its scores mean. A gallery is served by the one that made
its vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.network import Float, Network
from models.pack import LivenessSpec, ModelPack, load_pack
from models.recognition import Recogniser, unit
from models.risk import Calibration
from service.batching import Batcher
from service.errors import EmbeddingError, ModelNotServedError, RecogniserMismatchError, SettingsError
from service.gallery.subjects import Gallery


def read_packs(paths: Sequence[Path]) -> list[ModelPack]:
    """Read and verify the packs to be served.

    Raises:
        PackError: one cannot be used.
        SettingsError: two have the same recogniser, or the same name.
    """
    packs: list[ModelPack] = []
    for path in paths:
        pack = load_pack(path)
        pack.verify()
        for other in packs:
            if pack.model_id == other.model_id or pack.recognition.fingerprint() == other.recognition.fingerprint():
                raise SettingsError(f"KITH_ALSO: {path} repeats pack {other.model_id}")
        packs.append(pack)
    return packs


@dataclass(frozen=True, eq=False)
class Served:
    """A recogniser, ready: ``batcher`` takes crops cut by its own alignment and gives unit vectors."""

    pack: ModelPack
    network: Network
    recogniser: Recogniser
    calibration: Calibration | None
    batcher: Batcher[NDArray[np.uint8], Float]

    @property
    def fingerprint(self) -> str:
        return self.recogniser.fingerprint

    @property
    def dimension(self) -> int:
        return self.recogniser.dimension


@dataclass(frozen=True, eq=False)
class Judge:
    """What tells people from pictures of them, ready: ``batcher`` takes crops as ``spec`` says, and gives scores."""

    spec: LivenessSpec
    network: Network
    batcher: Batcher[NDArray[np.uint8], float]


class Recognisers:
    """By fingerprint. The ``default``, of KITH_PACK, makes new galleries' vectors."""

    def __init__(self, default: Served, *also: Served) -> None:
        self.default = default
        self._by_fingerprint = {served.fingerprint: served for served in (default, *also)}

    def __iter__(self) -> Iterator[Served]:
        return iter(self._by_fingerprint.values())

    @property
    def largest_dimension(self) -> int:
        return max(served.dimension for served in self)

    def get(self, fingerprint: str) -> Served | None:
        return self._by_fingerprint.get(fingerprint)

    def of(self, gallery: Gallery) -> Served:
        """Raises RecogniserMismatchError if the gallery's recogniser is not served."""
        served = self.get(gallery.fingerprint)
        if served is None:
            raise RecogniserMismatchError(
                f"gallery {gallery.name!r} holds vectors of recogniser {gallery.fingerprint[:12]}, which is not served"
            )
        return served

    def named(self, name: str | None) -> Served:
        """By a pack's name or its recogniser's fingerprint; None: the default. Raises ModelNotServedError."""
        if name is None:
            return self.default
        for served in self:
            if name in (served.pack.model_id, served.fingerprint):
                return served
        raise ModelNotServedError(f"no pack {name!r} is served")


def check_recogniser(gallery: Gallery, fingerprint: str | None) -> None:
    """Raises RecogniserMismatchError if the gallery's vectors are another recogniser's, or if nobody says whose those
    are that it is sent (None), and it has, or had, vectors of two."""
    if fingerprint is None:
        if gallery.moved:
            raise RecogniserMismatchError(
                f"gallery {gallery.name!r} moves, or once moved, to another recogniser: say with embeddings whose they "
                "are: recogniser, as /v1/embed answered with them"
            )
    elif gallery.fingerprint != fingerprint:
        raise RecogniserMismatchError(
            f"gallery {gallery.name!r} holds vectors of recogniser {gallery.fingerprint[:12]}"
        )


def check_vectors(vectors: list[list[float]], dimension: int) -> Float:
    """Turn given embeddings into (n, d) unit vectors. Raises EmbeddingError."""
    for i, vector in enumerate(vectors):
        if len(vector) != dimension:
            raise EmbeddingError(f"embedding {i} has {len(vector)} numbers, this recogniser's have {dimension}")
    try:
        return unit(np.asarray(vectors, np.float64).reshape(-1, dimension))
    except ValueError as error:
        raise EmbeddingError(str(error)) from error

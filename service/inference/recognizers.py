"""Served recognizers, one per pack. A gallery uses the recognizer that made its vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.pack.loading import load_pack, with_pulled_liveness
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration
from models.runtime.network import Float, Network
from models.vision.recognition import Recognizer, l2_normalize
from models.vision.specs import LivenessSpec
from service.core.errors import InvalidDataError, RecognizerMismatchError, RefusedError, SettingsError
from service.domain.gallery import Gallery
from service.inference.batcher import Batcher


def read_packs(paths: Sequence[Path], models_dir: Path) -> list[ModelPack]:
    """Read and verify the packs to be served. The first has the pulled liveness network, if it has none of its own.

    Raises:
        PackError: A pack cannot be used.
        SettingsError: Two packs have the same recognizer or name.
    """
    packs: list[ModelPack] = []
    for path in paths:
        pack = load_pack(path)
        if not packs:
            pack = with_pulled_liveness(pack, models_dir)
        pack.verify()
        for other in packs:
            if pack.model_id == other.model_id or pack.recognition.fingerprint() == other.recognition.fingerprint():
                raise SettingsError(f"KITH_EXTRA_PACKS: {path} repeats pack {other.model_id}")
        packs.append(pack)
    return packs


@dataclass(frozen=True, eq=False)
class ServedRecognizer:
    """Loaded recognizer. ``batcher`` maps crops of its own alignment to unit vectors."""

    pack: ModelPack
    network: Network
    recognizer: Recognizer
    calibration: Calibration | None
    batcher: Batcher[NDArray[np.uint8], Float]

    @property
    def fingerprint(self) -> str:
        return self.recognizer.fingerprint

    @property
    def dimension(self) -> int:
        return self.recognizer.dimension


@dataclass(frozen=True, eq=False)
class LivenessJudge:
    """Loaded liveness model. ``batcher`` maps crops, as ``spec`` defines them, to scores."""

    spec: LivenessSpec
    network: Network
    batcher: Batcher[NDArray[np.uint8], float]


class Recognizers:
    """Served recognizers by fingerprint. New galleries use the ``default``, from KITH_PACK."""

    def __init__(self, default: ServedRecognizer, *also: ServedRecognizer) -> None:
        self.default = default
        self._by_fingerprint = {served.fingerprint: served for served in (default, *also)}

    def __iter__(self) -> Iterator[ServedRecognizer]:
        return iter(self._by_fingerprint.values())

    @property
    def largest_dimension(self) -> int:
        return max(served.dimension for served in self)

    def get(self, fingerprint: str) -> ServedRecognizer | None:
        return self._by_fingerprint.get(fingerprint)

    def for_gallery(self, gallery: Gallery) -> ServedRecognizer:
        """Return the gallery's recognizer. Raises RecognizerMismatchError if it is not served."""
        served = self.get(gallery.fingerprint)
        if served is None:
            raise RecognizerMismatchError(
                f"gallery {gallery.name!r} holds vectors of recognizer {gallery.fingerprint[:12]}, which is not served"
            )
        return served

    def by_name(self, name: str | None) -> ServedRecognizer:
        """Return a recognizer by pack name or fingerprint, the default for None. Raises model_not_served."""
        if name is None:
            return self.default
        for served in self:
            if name in (served.pack.model_id, served.fingerprint):
                return served
        raise RefusedError("model_not_served", f"no pack {name!r} is served")


def check_recognizer(gallery: Gallery, fingerprint: str | None) -> None:
    """Raise RecognizerMismatchError if embeddings of ``fingerprint`` do not fit the gallery.

    None is rejected too, if the gallery has, or had, vectors of two recognizers.
    """
    if fingerprint is None:
        if gallery.moved:
            raise RecognizerMismatchError(
                f"gallery {gallery.name!r} was migrated to another recognizer, or is being migrated: send 'recognizer' "
                "with embeddings, as returned by /v1/embed"
            )
    elif gallery.fingerprint != fingerprint:
        raise RecognizerMismatchError(
            f"gallery {gallery.name!r} holds vectors of recognizer {gallery.fingerprint[:12]}"
        )


def check_vectors(vectors: list[list[float]], dimension: int) -> Float:
    """Normalize embeddings of a request to (n, d) unit vectors. Raises embedding_invalid."""
    for i, vector in enumerate(vectors):
        if len(vector) != dimension:
            raise InvalidDataError(
                "embedding", f"embedding {i} has {len(vector)} numbers, this recognizer's have {dimension}"
            )
    try:
        return l2_normalize(np.asarray(vectors, np.float64).reshape(-1, dimension))
    except ValueError as error:
        raise InvalidDataError("embedding", str(error)) from error

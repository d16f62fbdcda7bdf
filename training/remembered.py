"""Networks that look at each picture once: answers are kept on disk by the picture's pixels.

LFW is measured through several detectors and recognisers, again and again while the rest of a pack changes. The key is
what a network sees, so that whatever changes before it (another alignment, another photo) is computed anew, and nothing
else is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.detection import DEFAULT_SCORE, Detector, Faces
from models.network import Float
from models.pack import DetectionSpec, RecognitionSpec, sha256_of
from models.recognition import Recogniser
from models.runtime import OnnxNetwork

VERSION = 1
"""Of how networks are fed and their outputs are read; a new one makes everything forgotten."""
DIGEST_BYTES = 16


class Memory:
    """Flat float32 arrays by 16-byte keys; ``save`` writes them to ``path``, whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[bytes, Float] = {}
        self._unsaved = False
        if path.is_file():
            with np.load(path) as stored:
                parts = np.split(stored["values"], np.cumsum(stored["lengths"])[:-1])
                self._rows = {key.tobytes(): part for key, part in zip(stored["keys"], parts, strict=True)}

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def __getitem__(self, key: bytes) -> Float:
        return self._rows[key]

    def __setitem__(self, key: bytes, row: Float) -> None:
        self._rows[key] = row
        self._unsaved = True

    def save(self) -> None:
        if not self._unsaved:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        keys = np.frombuffer(b"".join(self._rows), np.uint8).reshape(-1, DIGEST_BYTES)
        lengths = np.array([len(row) for row in self._rows.values()])
        with partial.open("wb") as stream:
            np.savez(stream, keys=keys, lengths=lengths, values=np.concatenate(list(self._rows.values())))
        partial.replace(self._path)
        self._unsaved = False


def digest(picture: NDArray[np.uint8], more: str = "") -> bytes:
    """The key of a picture, and of whatever else decides what a network answers."""
    pixels = np.ascontiguousarray(picture)
    return hashlib.blake2b(f"{pixels.shape} {more}".encode() + pixels.tobytes(), digest_size=DIGEST_BYTES).digest()


class RememberingDetector(Detector):
    """A pack's detector that keeps the faces of every photo it has seen in ``cache_dir``."""

    def __init__(self, spec: DetectionSpec, cache_dir: Path, min_score: float = DEFAULT_SCORE) -> None:
        super().__init__(OnnxNetwork(spec.path), spec, min_score)
        text = f"{VERSION} {sha256_of(spec.path)} {spec.normalisation} {spec.head}"
        self.memory = Memory(cache_dir / f"faces-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz")

    def detect(self, images: Sequence[NDArray[np.uint8]]) -> list[Faces]:
        keys = [digest(image, f"{self.min_score:.4f}") for image in images]
        if new := [i for i, key in enumerate(keys) if key not in self.memory]:
            for i, faces in zip(new, super().detect([images[i] for i in new]), strict=True):
                table = [faces.boxes_xyxy, faces.landmarks_xy.reshape(-1, 10), faces.scores[:, None]]
                self.memory[keys[i]] = np.concatenate(table, 1).ravel()
        return [_faces(self.memory[key].reshape(-1, 15)) for key in keys]


def _faces(table: Float) -> Faces:
    return Faces(table[:, :4], table[:, 4:14].reshape(-1, 5, 2), table[:, 14])


class RememberingRecogniser(Recogniser):
    """A pack's recogniser that keeps the vector of every crop it has seen in ``cache_dir``."""

    def __init__(self, spec: RecognitionSpec, cache_dir: Path) -> None:
        super().__init__(OnnxNetwork(spec.path), spec)
        self.memory = Memory(cache_dir / f"vectors-{VERSION}-{self.fingerprint[:16]}.npz")

    def embed(self, crops: NDArray[np.uint8]) -> Float:
        keys = [digest(crop) for crop in crops]
        if new := [i for i, key in enumerate(keys) if key not in self.memory]:
            for i, vector in zip(new, super().embed(crops[new]), strict=True):
                self.memory[keys[i]] = vector
        return np.stack([self.memory[key] for key in keys]) if keys else super().embed(crops)

"""Disk cache of network outputs, keyed by pixels or by photo.

Packs are measured repeatedly while parts of them change. Only inputs that changed run through the networks again, and
photos whose result is known are not decoded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.checksums import sha256_of
from models.runtime.network import Float
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import DEFAULT_MIN_SCORE, Detections, Detector
from models.vision.recognition import Recognizer
from models.vision.specs import DetectionSpec, RecognitionSpec

VERSION = 1
"""Version of the network inputs and outputs. Increase it to invalidate all caches."""
DIGEST_BYTES = 16


class ArrayCache:
    """Flat float32 arrays by 16-byte keys. `save` writes them to ``path`` atomically."""

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


def image_key(image: NDArray[np.uint8], extra: str = "") -> bytes:
    """Return the cache key of an image and any other input."""
    pixels = np.ascontiguousarray(image)
    return hashlib.blake2b(f"{pixels.shape} {extra}".encode() + pixels.tobytes(), digest_size=DIGEST_BYTES).digest()


def photo_key(photo: Path, extra: str = "") -> bytes:
    """Return the cache key of a file, by path, size and time of change, and any other input."""
    stamp = f"{photo.stat().st_size} {photo.stat().st_mtime_ns}" if photo.is_file() else "missing"
    text = f"{photo.resolve()} {stamp} {extra}"
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def cached_rows(
    cache: ArrayCache, keys: Sequence[bytes], compute: Callable[[list[int]], Iterable[tuple[int, Float]]]
) -> list[Float]:
    """Return a row for each key. ``compute`` yields rows by index; an index that it leaves out gets an empty row."""
    new = [i for i, key in enumerate(keys) if key not in cache]
    for i, row in compute(new) if new else ():
        cache[keys[i]] = row
    for i in new:
        if keys[i] not in cache:
            cache[keys[i]] = np.zeros(0, np.float32)
    return [cache[key] for key in keys]


class CachedDetector(Detector):
    """Detector of a pack that caches the faces of each photo in ``cache_dir``."""

    def __init__(self, spec: DetectionSpec, cache_dir: Path, min_score: float = DEFAULT_MIN_SCORE) -> None:
        super().__init__(OnnxNetwork(spec.path), spec, min_score)
        text = f"{VERSION} {sha256_of(spec.path)} {spec.normalization} {spec.head}"
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.cache = ArrayCache(cache_dir / f"faces-{self.key}.npz")

    def detect(self, images: Sequence[NDArray[np.uint8]]) -> list[Detections]:
        keys = [image_key(image, f"{self.min_score:.4f}") for image in images]
        if new := [i for i, key in enumerate(keys) if key not in self.cache]:
            for i, faces in zip(new, super().detect([images[i] for i in new]), strict=True):
                table = [faces.boxes_xyxy, faces.landmarks_xy.reshape(-1, 10), faces.scores[:, None]]
                self.cache[keys[i]] = np.concatenate(table, 1).ravel()
        return [_faces(self.cache[key].reshape(-1, 15)) for key in keys]


def _faces(table: Float) -> Detections:
    return Detections(table[:, :4], table[:, 4:14].reshape(-1, 5, 2), table[:, 14])


class CachedRecognizer(Recognizer):
    """Recognizer of a pack that caches the vector of each crop in ``cache_dir``."""

    def __init__(self, spec: RecognitionSpec, cache_dir: Path) -> None:
        super().__init__(OnnxNetwork(spec.path), spec)
        self.cache = ArrayCache(cache_dir / f"vectors-{VERSION}-{self.fingerprint[:16]}.npz")

    def embed(self, crops: NDArray[np.uint8]) -> Float:
        keys = [image_key(crop) for crop in crops]
        if new := [i for i, key in enumerate(keys) if key not in self.cache]:
            for i, vector in zip(new, super().embed(crops[new]), strict=True):
                self.cache[keys[i]] = vector
        return np.stack([self.cache[key] for key in keys]) if keys else super().embed(crops)

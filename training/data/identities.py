"""Identity-labelled face crops from a manifest or a folder, decoded once into a uint8 cache."""

from __future__ import annotations

import csv
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.alignment import CROP_SIZE_PX, align
from models.detection import Detector
from training.config import ConfigError, DataConfig

PHOTO_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IdentityList:
    """Which file shows whom. ``labels`` are 0..C-1, in the order of ``names``."""

    files: tuple[Path, ...]
    labels: NDArray[np.int64]
    names: tuple[str, ...]


@dataclass(frozen=True)
class IdentitySet:
    """Decoded crops: ``crops_NHWC`` (n, 112, 112, 3) uint8 RGB, ``labels`` (n,) in 0..C-1."""

    crops_NHWC: NDArray[np.uint8]
    labels: NDArray[np.int64]
    names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        return len(self.names)

    def __len__(self) -> int:
        return len(self.labels)


def list_identities(config: DataConfig) -> IdentityList:
    """Read the manifest or the folder; drop people with too few images.

    Raises:
        ConfigError: nothing usable was found, or the manifest lacks a column.
    """
    pairs = list(_from_manifest(config.root / config.manifest) if config.manifest else _from_folder(config.root))
    counts = Counter(name for _, name in pairs)
    names = sorted(name for name, count in counts.items() if count >= config.min_images)[: config.max_identities]
    if len(names) < 2:
        raise ConfigError(f"{config.root}: fewer than two people have {config.min_images} images or more")
    index = {name: i for i, name in enumerate(names)}
    kept = [(file, index[name]) for file, name in pairs if name in index]
    return IdentityList(tuple(f for f, _ in kept), np.array([i for _, i in kept], np.int64), tuple(names))


def _from_manifest(manifest: Path) -> Iterator[tuple[Path, str]]:
    if not manifest.is_file():
        raise ConfigError(f"manifest {manifest} does not exist")
    with manifest.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        missing = {"file", "identity"} - set(reader.fieldnames or ())
        if missing:
            raise ConfigError(f"manifest {manifest} lacks the column(s) {', '.join(sorted(missing))}")
        for row in reader:
            yield manifest.parent / row["file"], row["identity"]


def _from_folder(root: Path) -> Iterator[tuple[Path, str]]:
    for person in sorted(p for p in root.iterdir() if p.is_dir()):
        for file in sorted(person.iterdir()):
            if file.suffix.lower() in PHOTO_SUFFIXES:
                yield file, person.name


def read_rgb(file: Path) -> NDArray[np.uint8]:
    """Decode one photo to (H, W, 3) uint8 RGB.

    Raises:
        ConfigError: the file cannot be read as an image.
    """
    image = cv2.imread(str(file), cv2.IMREAD_COLOR)
    if image is None:
        raise ConfigError(f"{file} cannot be decoded as an image; remove it or fix it")
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), np.uint8)


def load_identities(config: DataConfig, cache_dir: Path, detector: Detector | None = None) -> IdentitySet:
    """Return every crop decoded, from a memory-mapped cache that is built on first use.

    A photo set that is not aligned needs ``detector``: the largest face of each photo is cut out, and photos without
    a face are dropped with a warning.
    """
    listed = list_identities(config)
    key = hashlib.sha256("\n".join([str(config), *map(str, listed.files)]).encode()).hexdigest()[:16]
    cache, kept_file = cache_dir / f"crops-{key}.npy", cache_dir / f"kept-{key}.npy"
    if not (cache.exists() and kept_file.exists()):
        cache_dir.mkdir(parents=True, exist_ok=True)
        _build_cache(listed, cache, kept_file, None if config.aligned else _need(detector))
    kept = np.load(kept_file)
    return IdentitySet(np.load(cache, mmap_mode="r"), listed.labels[kept], listed.names)


def _need(detector: Detector | None) -> Detector:
    if detector is None:
        raise ConfigError("photos that are not aligned crops need a detector: name a pack with --align-with")
    return detector


def _build_cache(listed: IdentityList, cache: Path, kept_file: Path, detector: Detector | None) -> None:
    """Decode all files once. Both files appear under their names only when complete."""
    partial = cache.with_suffix(".partial")
    shape = (len(listed.files), CROP_SIZE_PX, CROP_SIZE_PX, 3)
    crops = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
    kept: list[int] = []
    with ThreadPoolExecutor() as pool:
        images = pool.map(read_rgb, listed.files)
        for i, image in enumerate(tqdm(images, total=len(listed.files), desc="decode", unit="img")):
            if detector is None:
                if image.shape[:2] != (CROP_SIZE_PX, CROP_SIZE_PX):
                    raise ConfigError(f"{listed.files[i]} is not a 112x112 crop; name a pack with --align-with")
                crops[len(kept)] = image
            else:
                faces = detector.detect([image])[0]
                if not len(faces):
                    log.warning("no face in %s: dropped", listed.files[i])
                    continue
                crops[len(kept)] = align(image, faces.landmarks_xy[faces.largest()][None])[0]
            kept.append(i)
    crops.flush()
    del crops
    np.save(kept_file, np.array(kept, np.int64))
    partial.rename(cache)

"""LFW-style ``.bin`` verification sets (lfw, cfp_fp, agedb_30...), as InsightFace ships them; read without mxnet."""

from __future__ import annotations

import codecs
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from models.alignment import CROP_SIZE_PX
from training.config import ConfigError
from training.data.identities import decode_rgb, in_threads


@dataclass(frozen=True, eq=False)
class VerificationSet:
    """P pairs: ``crops_NHWC`` (2P, 112, 112, 3) uint8 RGB, the pair p being crops 2p and 2p + 1; ``same`` (P,) bool."""

    crops_NHWC: NDArray[np.uint8]
    same: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.same)


def read_bin(path: Path) -> VerificationSet:
    """Read a set: a pickle, of Python 2 or 3, of (encoded images, whether each pair is of one person).

    Raises:
        ConfigError: it is no such pickle, holds anything but images and truths, or an image is no 112x112 crop.
    """
    images, same = _unpickled(path)
    if len(images) != 2 * len(same):
        raise ConfigError(f"{path} has {len(images)} images for {len(same)} pairs; it must have two a pair")

    def decoded(i: int) -> NDArray[np.uint8]:
        crop = decode_rgb(bytes(images[i]), f"{path}, image {i}")
        if crop.shape[:2] != (CROP_SIZE_PX, CROP_SIZE_PX):
            raise ConfigError(f"{path}, image {i} is {crop.shape[1]}x{crop.shape[0]}; the set must hold 112x112 crops")
        return crop

    crops = np.empty((len(images), CROP_SIZE_PX, CROP_SIZE_PX, 3), np.uint8)
    for i, crop in enumerate(in_threads(decoded, range(len(images)))):
        crops[i] = crop
    return VerificationSet(crops, np.array(same, bool))


def write_bin(path: Path, images: Sequence[bytes], same: Sequence[bool]) -> None:
    """Write encoded images, two a pair, in the published layout.

    Raises:
        ValueError: there are not two images a pair.
    """
    if len(images) != 2 * len(same):
        raise ValueError(f"{len(images)} images for {len(same)} pairs")
    path.write_bytes(pickle.dumps(([bytes(i) for i in images], [bool(s) for s in same]), protocol=4))


def _unpickled(path: Path) -> tuple[Sequence[bytes | NDArray[np.uint8]], Sequence[bool]]:
    try:
        with path.open("rb") as stream:
            images, same = _Unpickler(stream, encoding="bytes").load()
        fits = all(isinstance(i, bytes) or (isinstance(i, np.ndarray) and i.dtype == np.uint8) for i in images)
        fits = fits and all(isinstance(s, bool | np.bool_ | int) for s in same)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise ConfigError(f"{path} is no verification set ({type(error).__name__}: {error}); copy it again") from error
    if not fits:
        raise ConfigError(f"{path} is no verification set: it must hold encoded images and a truth for each pair")
    return images, same


class _Unpickler(pickle.Unpickler):
    """A pickle names the functions that rebuild its objects, and could name any: only those of bytes and arrays are
    admitted. Arrays' are taken from NumPy's own pickles, for they move about between its versions."""

    ADMITTED: ClassVar[Mapping[tuple[str, str], Any]] = {
        ("builtins", "bytes"): bytes,
        ("_codecs", "encode"): codecs.encode,  # Python 3 writes bytes so where Python 2 shall read them
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.multiarray", "_reconstruct"): np.zeros(1).__reduce__()[0],
        ("numpy.multiarray", "scalar"): np.bool_(True).__reduce__()[0],
        ("numpy.numeric", "_frombuffer"): np.zeros(1).__reduce_ex__(5)[0],
    }

    def find_class(self, module: str, name: str) -> Any:
        home = re.sub(r"^numpy\._?core\.", "numpy.", module).replace("__builtin__", "builtins")
        if (home, name) not in self.ADMITTED:
            raise ConfigError(f"refused: the file wants to run {module}.{name}, which no verification set needs")
        return self.ADMITTED[home, name]

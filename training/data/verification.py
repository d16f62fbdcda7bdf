"""LFW-style ``.bin`` verification sets (lfw, cfp_fp, agedb_30...), InsightFace's format; needs no mxnet."""

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

from models.vision.alignment import CROP_SIZE_PX
from training.config import ConfigError
from training.data.identities import decode_rgb, map_in_threads


@dataclass(frozen=True, eq=False)
class VerificationSet:
    """P pairs: ``crops_NHWC`` (2P, 112, 112, 3) uint8 RGB, pair p is crops 2p and 2p + 1; ``same`` (P,) bool."""

    crops_NHWC: NDArray[np.uint8]
    same: NDArray[np.bool_]


def read_bin(path: Path) -> VerificationSet:
    """Read a set: a pickle of Python 2 or 3 with (encoded images, same-person flags). Raises ConfigError if invalid
    pickle, unexpected content, or an image that is not a 112x112 crop."""
    images, same = _unpickle(path)
    if len(images) != 2 * len(same):
        raise ConfigError(f"{path} has {len(images)} images for {len(same)} pairs, but needs two per pair")

    def decoded(i: int) -> NDArray[np.uint8]:
        crop = decode_rgb(bytes(images[i]), f"{path}, image {i}")
        if crop.shape[:2] != (CROP_SIZE_PX, CROP_SIZE_PX):
            raise ConfigError(f"{path}, image {i} is {crop.shape[1]}x{crop.shape[0]}, but must be 112x112")
        return crop

    crops = np.empty((len(images), CROP_SIZE_PX, CROP_SIZE_PX, 3), np.uint8)
    for i, crop in enumerate(map_in_threads(decoded, range(len(images)))):
        crops[i] = crop
    return VerificationSet(crops, np.array(same, bool))


def _unpickle(path: Path) -> tuple[Sequence[bytes | NDArray[np.uint8]], Sequence[bool]]:
    try:
        with path.open("rb") as stream:
            images, same = _RestrictedUnpickler(stream, encoding="bytes").load()
        fits = all(isinstance(i, bytes) or (isinstance(i, np.ndarray) and i.dtype == np.uint8) for i in images)
        fits = fits and all(isinstance(s, bool | np.bool_ | int) for s in same)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise ConfigError(
            f"{path} is not a verification set ({type(error).__name__}: {error}). Copy it again"
        ) from error
    if not fits:
        raise ConfigError(f"{path} is not a verification set: it must hold encoded images and one flag per pair")
    return images, same


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that only allows the constructors of bytes and arrays. A pickle can name any function to call.
    Constructors of arrays are taken from NumPy itself, since their module names differ between versions."""

    ALLOWED: ClassVar[Mapping[tuple[str, str], Any]] = {
        ("builtins", "bytes"): bytes,
        ("_codecs", "encode"): codecs.encode,  # bytes written by Python 3 for Python 2
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.multiarray", "_reconstruct"): np.zeros(1).__reduce__()[0],
        ("numpy.multiarray", "scalar"): np.bool_(True).__reduce__()[0],
        ("numpy.numeric", "_frombuffer"): np.zeros(1).__reduce_ex__(5)[0],
    }

    def find_class(self, module: str, name: str) -> Any:
        home = re.sub(r"^numpy\._?core\.", "numpy.", module).replace("__builtin__", "builtins")
        if (home, name) not in self.ALLOWED:
            raise ConfigError(f"rejected: the file calls {module}.{name}, which verification sets do not need")
        return self.ALLOWED[home, name]

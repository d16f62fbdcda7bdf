"""CFP: its crops and the official pairs, frontal with frontal (FF) and frontal with profile (FP)."""

from __future__ import annotations

import csv
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.vision.alignment import CROP_SIZE_PX
from training.config import ConfigError
from training.data.cache import cached_crops
from training.data.folders import read_list
from training.data.identities import decode_rgb
from training.evaluation.embedding import Embed, Embeddings, Pairs, embed_crops

CFP_LISTS: Final = {"CFP-FF": "pairs_FF.csv", "CFP-FP": "pairs_FP.csv"}
ARCHIVE: Final = "cfp.tar"
NO_FACE: Final = ""
"""File of a photo without a detected face, in the lists."""


@dataclass(frozen=True, eq=False)
class CfpCrops:
    """Crops of CFP: ``files`` (n,), ``crops_NHWC`` (n, 112, 112, 3) uint8 RGB, and the pairs by name of their list."""

    files: tuple[str, ...]
    crops_NHWC: NDArray[np.uint8]
    pairs: Mapping[str, Pairs]


def read_cfp_pairs(path: Path) -> Pairs:
    """Read a list with the columns fold, same, file_a and file_b. Raises ConfigError if it is missing or malformed."""
    rows = list(csv.DictReader(read_list(path).splitlines()))
    try:
        first, second = (tuple(str(row[column]) for row in rows) for column in ("file_a", "file_b"))
        same = np.array([bool(int(row["same"])) for row in rows])
        folds = np.array([int(row["fold"]) for row in rows], np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is malformed: {type(error).__name__} {error}") from error
    if not len(rows) or same.all() or not same.any():
        raise ConfigError(f"{path} needs same-person and different-person pairs")
    return Pairs(first, second, same, folds)


def load_cfp_crops(root: Path, cache_dir: Path) -> CfpCrops:
    """Read the lists and the crops of cfp/ of the research data. Crops are cached in ``cache_dir`` as a memory map.
    Raises ConfigError if a list is missing, or a crop is missing or not 112x112."""
    pairs = {name: read_cfp_pairs(root / file) for name, file in CFP_LISTS.items()}
    named = {file for each in pairs.values() for file in (*each.first, *each.second)}
    files = tuple(sorted(named - {NO_FACE}))
    archive = root / ARCHIVE
    if not archive.is_file():
        raise ConfigError(f"{archive} does not exist")
    identity = "\n".join((*files, str(archive.stat().st_size), str(archive.stat().st_mtime_ns)))
    crops, _ = cached_crops(
        cache_dir, "cfp", identity, len(files), CROP_SIZE_PX, lambda crops: _read(archive, files, crops)
    )
    return CfpCrops(files, crops, pairs)


def _read(archive: Path, files: tuple[str, ...], crops_NHWC: NDArray[np.uint8]) -> NDArray[np.bool_]:
    row_of = {file: row for row, file in enumerate(files)}
    seen = np.zeros(len(files), bool)
    with tarfile.open(archive) as tar:
        for member in tar:
            row = row_of.get(member.name)
            stream = None if row is None else tar.extractfile(member)
            if row is None or stream is None:
                continue
            crop = decode_rgb(stream.read(), f"{archive}, {member.name}")
            if crop.shape[:2] != (CROP_SIZE_PX, CROP_SIZE_PX):
                raise ConfigError(f"{archive}, {member.name} is not a 112x112 crop")
            crops_NHWC[row], seen[row] = crop, True
    if not seen.all():
        absent = files[int(np.flatnonzero(~seen)[0])]
        raise ConfigError(f"{archive} lacks {int((~seen).sum())} crops that the lists name, first {absent}")
    return seen


def embed_cfp(embed: Embed, crops: CfpCrops) -> Embeddings:
    """Embed all crops. A photo without a face gets a zero vector, which is similar to nothing."""
    vectors = embed_crops(embed, crops.crops_NHWC)
    found = np.ones(len(crops.files) + 1, bool)
    found[-1] = False
    return Embeddings((*crops.files, NO_FACE), np.concatenate([vectors, np.zeros_like(vectors[:1])]), found)

"""Trillion-Pairs in DeepGlint's layout: a list of photos with landmarks, and the file of features for its score."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float
from models.vision.alignment import LANDMARK_COUNT, Alignment
from training.config import ConfigError
from training.evaluation.embedding import Embed, embed_batch, given_crops
from training.evaluation.metrics import Floats, Ints
from training.evaluation.protocols import TrillionPairs, trillion_pairs

LIST: Final = "testdata_lmk.txt"
DISTRACTOR: Final = -1
OPENCV_FLOAT32: Final = 5


@dataclass(frozen=True, eq=False)
class ListedFaces:
    """Photos, (n, 5, 2) landmarks in pixels, and (n,) labels, -1 for a distractor; None for a list without labels."""

    files: tuple[str, ...]
    landmarks_xy: Floats
    labels: Ints | None


def evaluate_trillion_pairs(
    embed: Embed, folder: Path, alignment: Alignment, flip: bool = False, features: Path | None = None
) -> TrillionPairs | None:
    """Embed the photos of ``testdata_lmk.txt`` by its landmarks, and measure or write the embeddings.

    DeepGlint's list of the test set has no labels: it scores the embeddings. A list may have a label after each path,
    as DeepGlint's lists of training sets do, here with -1 for distractors; it is measured.

    Args:
        folder: has ``testdata_lmk.txt``, and the photos by the paths in it.
        features: file to write all embeddings to, in the order of the list, as DeepGlint's tools do.

    Returns:
        The metrics, or None for a list without labels.

    Raises:
        ConfigError: list or photo missing or malformed; neither labels nor ``features``; no distractor, or no person
            with two photos.
    """
    listed = read_faces(folder / LIST)
    if listed.labels is None and features is None:
        raise ConfigError(
            f"{folder / LIST} has no labels, which DeepGlint keeps: write the embeddings with --features, or add a "
            f"label after each path, {DISTRACTOR} for distractors"
        )
    photos = [folder / file for file in listed.files]
    if missing := [photo for photo in photos if not photo.is_file()]:
        raise ConfigError(f"{len(missing)} photos of {folder / LIST} are missing, first {missing[0]}")
    batches = given_crops(photos, listed.landmarks_xy, alignment)
    vectors = np.concatenate([embed_batch(embed, crops, flip) for _, crops in batches])
    if features is not None:
        write_features(features, vectors)
    if listed.labels is None:
        return None
    other = listed.labels == DISTRACTOR
    if not other.any():
        raise ConfigError(f"{folder / LIST} has no distractors, whose label is {DISTRACTOR}")
    wide = vectors.astype(np.float64)
    try:
        return trillion_pairs(wide[~other], listed.labels[~other], wide[other])
    except ValueError as error:
        raise ConfigError(f"{folder / LIST}: {error}") from error


def read_faces(path: Path) -> ListedFaces:
    """Read lines of "path x1 y1 ... x5 y5", or "path label x1 y1 ... x5 y5". Raises ConfigError if the file is missing,
    empty or malformed."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    plain = 1 + 2 * LANDMARK_COUNT
    files, labels = list[str](), list[int]()
    numbers = array("d")  # two million lines: lists of texts would take gigabytes
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            row = line.split()
            if len(row) not in (plain, plain + 1) or (files and (len(row) > plain) != bool(labels)):
                raise ConfigError(
                    f"{path}, line {number}: each line needs a path, x and y of five landmarks, and between them a "
                    "label in all lines or in none"
                )
            try:
                numbers.extend(map(float, row[-2 * LANDMARK_COUNT :]))
                labels += [int(text) for text in row[1 : -2 * LANDMARK_COUNT]]
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
            files.append(row[0])
    points = np.array(numbers).reshape(-1, LANDMARK_COUNT, 2)
    if not files or not np.isfinite(points).all():
        raise ConfigError(f"{path} lists no photo, or a landmark that is not finite")
    return ListedFaces(tuple(files), points, np.array(labels, np.int64) if labels else None)


def write_features(path: Path, vectors: Float) -> None:
    """Write (n, d) embeddings as DeepGlint's and MegaFace's tools do: rows, columns, bytes per row and OpenCV's type of
    float32, each a little-endian int32, then the numbers."""
    rows: NDArray[np.float32] = np.ascontiguousarray(vectors, "<f4")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(struct.pack("<4i", *rows.shape, rows.strides[0], OPENCV_FLOAT32))
        stream.write(rows.tobytes())

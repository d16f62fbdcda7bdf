"""Photos of `bench.groups`: aligned crops with labels of age, gender, race and mask, and their embeddings.

FairFace, All-Age-Faces, masks and CFP are crops already. LFW is aligned by the landmarks that come with it, which are
those of the same detector.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from bench.risk_photos import calibration_files, lfw_people, one_name, read_crops, rows_of
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration
from models.runtime.network import Float
from models.vision.alignment import align, realign_crops
from training.config import AugmentConfig
from training.data.augment import augment, draw_uniforms
from training.data.identities import read_rgb
from training.evaluation.detection import read_reference_faces
from training.evaluation.embedding import embed_crops
from training.evaluation.embedding_cache import CachedRecognizer
from training.evaluation.lfw import people_of
from training.evaluation.metrics import Bools
from training.export.calibrate import calibrate
from training.optimization.loop import to_tensor

Names = NDArray[np.str_]
T = TypeVar("T")
FAIRFACE_AGES: Final = {"more than 70": "60 and over", "60-69": "60 and over"}
AAF_AGES: Final = ((13, "2-12"), (18, "13-17"), (40, "18-39"), (60, "40-59"), (100, "60-80"))
SAME_PERSON: Final = 0.6
"""Least similarity of photos of one person, by the reference recognizer: far above all pairs of strangers in LFW."""
BLOCK_ROWS: Final = 512
LFW_PEOPLE: Final = 1000
ONLY_MASKS: Final = AugmentConfig(
    flip=0, move=0, low_resolution=0, gray=0, brightness=0, contrast=0, saturation=0, erase=0, mask=1
)
CROSSING: Final = "race and gender"
MIN_PHOTOS: Final = 30


@dataclass(frozen=True, eq=False)
class Photos:
    """Embedded crops of a collection: (n, d) ``vectors`` of unit length, (n,) names of ``people``, and (n,) ``labels``
    by kind, such as ``race``; an empty label is unknown."""

    vectors: Float
    people: Names
    labels: Mapping[str, Names]

    def groups(self) -> Iterator[tuple[str, str, Bools]]:
        """Yield kind, name and photos of each group with MIN_PHOTOS or more."""
        for kind, names in self.labels.items():
            for name in sorted(set(names.tolist()) - {""}):
                if (chosen := names == name).sum() >= MIN_PHOTOS:
                    yield kind, name, chosen


class CropEmbedder:
    """Recognizer of a pack for standard crops, cached on disk."""

    def __init__(self, pack: ModelPack, cache: Path) -> None:
        self._recognizer = CachedRecognizer(pack.recognition, cache)

    def embed(self, crops: NDArray[np.uint8]) -> Float:
        """Return (n, d) unit vectors of (n, 112, 112, 3) crops."""
        return embed_crops(lambda some: self._recognizer.embed(realign_crops(some, self._recognizer.alignment)), crops)

    def save(self) -> None:
        self._recognizer.cache.save()


def calibration_of(pack: ModelPack, data: Path, embedder: CropEmbedder) -> Calibration:
    """Return the pack's calibration, or one on LFW View 1's training list outside the open-set protocol."""
    document = pack.calibration
    if document is None:
        files = calibration_files(data / "lfw")
        document = calibrate(embedder.embed(lfw_crops(data, files)), people_of(files).tolist(), "LFW View 1")
    return Calibration.from_document(document)


def lfw_crops(data: Path, files: Sequence[str]) -> NDArray[np.uint8]:
    """Align photos of LFW by the landmarks that come with them: like the other crops, these are of one detector."""
    points = {face.file: face.points_xy for face in read_reference_faces(data / "lfw" / "landmarks_yunet.csv")}
    return np.concatenate([align(read_rgb(data / "lfw" / "images" / file), points[file][None]) for file in files])


def lfw(data: Path, embedder: CropEmbedder, share: float) -> Photos:
    """Return two photos of each person of LFW, each without and with a synthetic mask, by the label ``photo``."""
    several = lfw_people(data)[0]
    known = [files[:2] for name, files in zip(one_name(list(several)), several.values(), strict=True) if name]
    files = [file for pair in first_share(known[:LFW_PEOPLE], share) for file in pair]
    crops = lfw_crops(data, files)
    people = one_name(people_of(files).tolist())
    number = np.tile(["first", "second"], len(files) // 2)
    return Photos(
        np.concatenate([embedder.embed(crops), embedder.embed(masked(crops))]),
        np.concatenate([people, people]),
        {"photo": np.concatenate([number, np.char.add(number, ", masked")])},
    )


def masked(crops: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Draw a random mask over nose, mouth and chin of each crop."""
    uniforms, parts = draw_uniforms(len(crops), 0, 0), []
    for i in range(0, len(crops), 256):
        part = augment(to_tensor(crops[i : i + 256]), uniforms[i : i + 256], ONLY_MASKS)
        parts.append(part.permute(0, 2, 3, 1).numpy())
    pixels = np.concatenate(parts)
    return np.asarray((pixels * 127.5 + 127.5).round(), np.uint8)


def faces(data: Path, collection: str, embedder: CropEmbedder, judge: CropEmbedder | None, share: float) -> Photos:
    """Return the photos of FairFace or All-Age-Faces, without people of other collections. ``judge``: recognizer that
    finds photos of one person, which the collections do not name."""
    kind = {"FairFace": "fairface", "All-Age-Faces": "aaf"}[collection]
    rows, crops = crops_of(data, lambda row: row["set"] == kind, share)
    people = one_name([f"{kind}-{row['row']}" for row in rows])
    if judge is not None:
        people = joined(judge.embed(crops), people)
    labels = [fairface_labels(row) if kind == "fairface" else aaf_labels(row) for row in rows]
    by_kind = {name: np.array([one[name] for one in labels]) for name in labels[0]}
    return subset(Photos(embedder.embed(crops), people, by_kind), np.char.startswith(people, f"{kind}-"))


def joined(vectors: Float, people: Names) -> Names:
    """Give one name to photos that are linked by a name, or by similarities of one person."""
    numbers = np.unique(people, return_inverse=True)[1]
    links = [np.empty((2, 0), np.int64)]
    for start in range(0, len(vectors), BLOCK_ROWS):
        found = np.nonzero(vectors[start : start + BLOCK_ROWS] @ vectors.T >= SAME_PERSON)
        links.append(numbers[np.stack([found[0] + start, found[1]])])
    ends = np.concatenate(links, 1)
    graph = coo_array((np.ones(ends.shape[1], bool), tuple(ends)), shape=2 * (int(numbers.max()) + 1,))
    person = connected_components(graph, directed=False)[1][numbers]
    return np.asarray(people[np.unique(person, return_index=True)[1]][person])


def fairface_labels(row: Mapping[str, str]) -> dict[str, str]:
    race = row["race"].replace("_", " or ")
    return {
        "age": FAIRFACE_AGES.get(row["age"], row["age"]),
        "gender": row["gender"],
        "race": race,
        CROSSING: f"{race}, {row['gender'].lower()}",
    }


def aaf_labels(row: Mapping[str, str]) -> dict[str, str]:
    age = next(band for end, band in AAF_AGES if int(row["age"]) < end)
    return {"age": age, "gender": {"f": "Female", "m": "Male"}[row["gender"]]}


def crops_of(
    data: Path, wanted: Callable[[dict[str, str]], bool], share: float
) -> tuple[list[dict[str, str]], NDArray[np.uint8]]:
    """Return rows of faces/manifest.csv with their labels and ``row`` in their set, and their crops."""
    counts: dict[str, int] = defaultdict(int)
    rows = []
    for row in rows_of(data / "faces" / "manifest.csv"):
        labels = dict(part.split("=", 1) for part in row["label"].split(";") if part)
        rows.append({**row, **labels, "row": str(counts[row["set"]])})
        counts[row["set"]] += 1
    rows = [row for row in rows if wanted(row)]
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    rows = [rows[i] for i in sorted(first_share(order, share))]
    crops = {
        archive: read_crops(data / "faces" / archive, {row["file"] for row in rows if row["archive"] == archive})
        for archive in {row["archive"] for row in rows}
    }
    return rows, np.stack([crops[row["archive"]][row["file"]] for row in rows])


def first_share(items: list[T], share: float) -> list[T]:
    """Return the first items, rounded up."""
    return items[: math.ceil(share * len(items))]


def subset(photos: Photos, chosen: Bools) -> Photos:
    labels = {kind: names[chosen] for kind, names in photos.labels.items()}
    return Photos(photos.vectors[chosen], photos.people[chosen], labels)

"""Photos of the development protocol for risk: sets of faces with vectors and quality, cached per pack.

The bundled pack's detector finds the faces for every pack. CFP's, All-Age-Faces' and FairFace's photos are crops, which
are padded with their edge before detection.
"""

from __future__ import annotations

import csv
import io
import tarfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.runtime.network import Float
from models.vision.alignment import align
from models.vision.quality import Quality, measure_quality
from training.data.identities import read_rgb
from training.evaluation.embedding import DETECT_BATCH_SIZE, Embedder
from training.evaluation.lfw import people_of, read_open_set, read_pairs

MAX_PHOTOS: Final = 4
"""Photos of one LFW person."""
LFW_STRANGERS: Final = 3500
DEGRADED_STRANGERS: Final = 1000
DEGRADED_PEOPLE: Final = 600
CFP_PHOTOS: Final = {"frontal": 4, "profile": 2}
OTHER_STRANGERS: Final = 1200
PADDING_PX: Final = 40
CHILDREN: Final = {"0-2", "3-9"}
SAME_PEOPLE: Final = Path(__file__).with_name("same_people.csv")
"""People with more than one name, in one set or in two: ``same_as`` is the other name, empty for wrong labels.

Found with the reference recognizer, whose similarities show a gap between these people and others.
"""
QUALITY: Final = (*Quality.__dataclass_fields__, "score")
Image = NDArray[np.uint8]


@dataclass(frozen=True)
class Photo:
    """One photo of a set: who it shows, what it is called, and how to read it."""

    person: str
    name: str
    read: Callable[[], Image]


@dataclass(frozen=True, eq=False)
class Faces:
    """Faces of a set that the detector found: (n, d) ``vectors`` of unit length, (n,) names of ``people`` and of
    ``photos``, (n, 8) ``quality`` in the order of `QUALITY`."""

    vectors: Float
    people: NDArray[np.str_]
    photos: NDArray[np.str_]
    quality: Float

    def __len__(self) -> int:
        return len(self.people)


def faces_of(name: str, data: Path, pack: ModelPack, cache: Path) -> Faces:
    """Return the faces of a set in `SETS`, from the cache if they were embedded before."""
    path = cache / "risk" / f"{pack.recognition.fingerprint()[:16]}" / f"{name}.npz"
    if not path.is_file():
        embedder = Embedder(replace(load_pack(BUNDLED_PACK), recognition=pack.recognition))
        faces = embedded_faces(SETS[name](data), embedder)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as stream:
            np.savez(stream, **{**vars(faces), "quality_names": np.array(QUALITY)})
        partial.replace(path)
    with np.load(path) as stored:
        return with_one_name(Faces(*(stored[field] for field in Faces.__dataclass_fields__)))


def with_one_name(faces: Faces) -> Faces:
    """Return the faces with one name per person, without those of unknown people."""
    same = {row["person"]: row["same_as"] for row in rows_of(SAME_PEOPLE)}
    people = np.array([same.get(person, person) for person in faces.people.tolist()])
    kept = people != ""
    return Faces(faces.vectors[kept], people[kept], faces.photos[kept], faces.quality[kept])


def embedded_faces(photos: Sequence[Photo], embedder: Embedder) -> Faces:
    """Detect, align, measure and embed the face nearest the center of each photo that shows one."""
    vectors, seen, qualities = [], list[Photo](), []
    for start in range(0, len(photos), DETECT_BATCH_SIZE):
        batch = photos[start : start + DETECT_BATCH_SIZE]
        images = [photo.read() for photo in batch]
        crops = []
        for photo, image, found in zip(batch, images, embedder.detector.detect(images), strict=True):
            if len(found):
                points = found.landmarks_xy[found.nearest(image.shape[1] / 2, image.shape[0] / 2)]
                crops.append(align(image, points[None], embedder.recognizer.alignment)[0])
                quality = measure_quality(align(image, points[None])[0], points)
                qualities.append([*vars(quality).values(), quality.score])
                seen.append(photo)
        if crops:
            vectors.append(embedder.recognizer.embed(np.stack(crops)))
    people, names = (np.array([getattr(photo, field) for photo in seen]) for field in ("person", "name"))
    return Faces(np.concatenate(vectors), people, names, np.array(qualities, np.float32))


def lfw_people(data: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of people with two photos or more, and one file of every other person.

    The people are in a fixed random order. The protocol's enrolled photo comes first.
    """
    protocol = read_open_set(data / "lfw" / "openset_protocol.json")
    images = data / "lfw" / "images"
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted(images.glob("*/*.jpg")):
        files[path.parent.name].append(str(path.relative_to(images)))
    order = sorted(files)
    np.random.default_rng(0).shuffle(order)
    first = set(protocol.gallery)
    several = {
        person: sorted(files[person], key=lambda file: (file not in first, file))[:MAX_PHOTOS]
        for person in order
        if len(files[person]) > 1
    }
    return several, [files[person][0] for person in order if len(files[person]) == 1]


def calibration_files(lfw: Path) -> list[str]:
    """Return the photos of View 1's training list whose people are not in the open-set protocol."""
    pairs, protocol = read_pairs(lfw / "pairsDevTrain.txt"), read_open_set(lfw / "openset_protocol.json")
    searched = set(people_of((*protocol.gallery, *protocol.strangers)))
    return sorted(file for file in {*pairs.first, *pairs.second} if file.split("/")[0] not in searched)


def lfw_photos(data: Path, files: Sequence[str], change: Callable[[Image], Image] = np.asarray) -> list[Photo]:
    def read(file: str) -> Image:
        return change(read_rgb(data / "lfw" / "images" / file))

    return [Photo(file.split("/")[0], file, partial(read, file)) for file in files]


def lfw(data: Path) -> list[Photo]:
    several, single = lfw_people(data)
    return lfw_photos(data, [*(f for files in several.values() for f in files), *single[:LFW_STRANGERS]])


def degraded(change: Callable[[Image], Image], data: Path) -> list[Photo]:
    """Return the first strangers of LFW, and the last photo of the first people, changed."""
    several, single = lfw_people(data)
    mated = [files[-1] for files in list(several.values())[:DEGRADED_PEOPLE]]
    return lfw_photos(data, [*mated, *single[:DEGRADED_STRANGERS]], change)


def padded(archive: Path, files: Sequence[tuple[str, str, str]]) -> list[Photo]:
    """Return the photos of a tar archive: person, name, member."""
    crops = read_crops(archive, {member for *_, member in files})

    def read(member: str) -> Image:
        return np.asarray(cv2.copyMakeBorder(crops[member], *(4 * (PADDING_PX,)), cv2.BORDER_REPLICATE), np.uint8)

    return [Photo(person, name, partial(read, member)) for person, name, member in files]


def read_crops(archive: Path, members: Collection[str]) -> dict[str, Image]:
    """Return the RGB images of members of a tar archive."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name in members and (stream := tar.extractfile(member)) is not None:
                with Pillow.open(io.BytesIO(stream.read())) as image:
                    found[member.name] = np.asarray(image.convert("RGB"))
    return found


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as lines:
        yield from csv.DictReader(lines)


def cfp(data: Path) -> list[Photo]:
    """Return four frontal and two profile photos of each person; names begin with the view."""
    chosen: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows_of(data / "cfp" / "manifest.csv"):
        label = dict(part.split("=") for part in row["label"].split(";"))
        if len(chosen[label["id"], label["view"]]) < CFP_PHOTOS[label["view"]]:
            chosen[label["id"], label["view"]].append(row["file"])
    files = [(f"cfp-{who}", f"{view}/{file}", file) for (who, view), some in chosen.items() for file in some]
    return padded(data / "cfp" / "cfp.tar", files)


def strangers(kind: str, data: Path) -> list[Photo]:
    """Return `OTHER_STRANGERS` photos of one collection in faces/, each of another person."""
    rows = [row for row in rows_of(data / "faces" / "manifest.csv") if row["set"] == kind]
    order = np.random.default_rng(0).permutation(len(rows))[:OTHER_STRANGERS]
    files = [(f"{kind}-{i}", rows[i]["file"], rows[i]["file"]) for i in order]
    return padded(data / "faces" / rows[0]["archive"], files)


def adult_groups(data: Path) -> dict[str, str]:
    """Return FairFace's label of race of each photo of an adult. Labels serve to measure only."""
    groups = {}
    for row in rows_of(data / "faces" / "manifest.csv"):
        if row["set"] == "fairface":
            label = dict(part.split("=") for part in row["label"].split(";"))
            if label["age"] not in CHILDREN:
                groups[row["file"]] = label["race"]
    return groups


def small(face_px: int, photo: Image) -> Image:
    """Shrink an LFW photo, whose face is about 95 px wide, to a face of ``face_px``."""
    scale = face_px / LFW_FACE_PX
    return np.asarray(cv2.resize(photo, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA), np.uint8)


def compressed(quality: int, photo: Image) -> Image:
    encoded = cv2.imencode(".jpg", photo, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    return np.asarray(cv2.imdecode(encoded, cv2.IMREAD_COLOR), np.uint8)


def noisy(photo: NDArray[Any], sigma: float) -> Image:
    """Add the noise of a sensor, in gray levels."""
    return np.asarray(np.clip(photo + np.random.default_rng(0).normal(0, sigma, photo.shape), 0, 255), np.uint8)


LFW_FACE_PX: Final = 95
DEGRADATIONS: Final[Mapping[str, Callable[[Image], Image]]] = {
    "face32": partial(small, 32),
    "face24": partial(small, 24),
    "blur": lambda photo: np.asarray(cv2.GaussianBlur(photo, (0, 0), 3), np.uint8),
    "motion": lambda photo: np.asarray(cv2.filter2D(photo, -1, np.full((1, 15), 1 / 15)), np.uint8),
    "jpeg": partial(compressed, 8),
    "dark": lambda photo: noisy(photo * 0.25, 3),
    "noise": lambda photo: noisy(photo, 25),
}
SETS: Final[Mapping[str, Callable[[Path], list[Photo]]]] = {
    "lfw": lfw,
    "cfp": cfp,
    "aaf": partial(strangers, "aaf"),
    "fairface": partial(strangers, "fairface"),
    **{name: partial(degraded, change) for name, change in DEGRADATIONS.items()},
}

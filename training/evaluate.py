"""A pack measured on LFW and WIDER FACE, through its own detector, as it will be served."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.alignment import CROP_SIZE_PX, Alignment, align, recut
from models.detection import Detector
from models.network import Float
from models.pack import ModelPack
from models.quality import Quality, measure
from models.recognition import Recogniser
from models.runtime import OnnxNetwork
from training.breakdown import Split, WorstPairs, splits, worst_pairs
from training.config import ConfigError
from training.data.identities import IdentityList, in_threads, read_rgb
from training.detection.evaluation import evaluate_detection
from training.metrics import (
    Floats,
    FoldAccuracy,
    Ints,
    OpenSet,
    best_threshold,
    bootstrap,
    equal_error_rate,
    fnir_at_fpir,
    fold_accuracy,
    fold_decisions,
    open_set,
    roc,
    search,
    tar_at_far,
)
from training.remembered import RememberingDetector, RememberingRecogniser

BATCH = 32
PEOPLE_BATCH: Final = 8
"""People's own photos may be large."""
DOUBTFUL_STRANGERS: Final = frozenset(
    {"Sung_Hong_Choi", "Wang_Nan", "Mireya_Elisa_Moscoso_Rodriguez", "John_Gruden", "Carlos_Ruckauf"}
)
"""Non-mated probes of the open-set protocol that LFW's labels get wrong: four are gallery people under another
spelling, the photo of the fifth is likely somebody else's. One in a thousand strangers is four: they matter."""
Interval = tuple[float, float]
Part = Literal["view1", "view2", "open_set"]
PARTS: Final[tuple[Part, ...]] = ("view1", "view2", "open_set")
VIEW1: Final[tuple[Part, ...]] = ("view1",)


@dataclass(frozen=True)
class Pairs:
    """An LFW list of pairs: photos relative to the images folder, who is same, which fold each belongs to."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    same: NDArray[np.bool_]
    folds: NDArray[np.int64]


def read_pairs(path: Path) -> Pairs:
    """Read pairs.txt (header: folds, pairs a kind) or a View 1 list (header: pairs a kind; one fold).

    Raises:
        ConfigError: the file is absent or a line is malformed.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    header, *lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line]
    fold_count = int(header[0]) if len(header) == 2 else 1
    per_fold = 2 * int(header[-1])
    first, second, same = [], [], []
    for fields in lines[: fold_count * per_fold]:
        match fields:
            case [person, a, b]:
                pair = (person, a, person, b)
            case [one, a, other, b]:
                pair = (one, a, other, b)
            case _:
                raise ConfigError(f"{path}: cannot read the line {fields}")
        first.append(_lfw_file(pair[0], int(pair[1])))
        second.append(_lfw_file(pair[2], int(pair[3])))
        same.append(len(fields) == 3)
    folds = np.repeat(np.arange(fold_count), per_fold)
    return Pairs(tuple(first), tuple(second), np.array(same), folds)


def _lfw_file(person: str, number: int) -> str:
    return f"{person}/{person}_{number:04d}.jpg"


class Embedder:
    """A pack as a function from photo files to unit vectors, by the central face of each photo. What its networks
    answer is kept in ``cache_dir``, if given, when :meth:`remember` is called."""

    def __init__(self, pack: ModelPack, min_score: float = 0.5, cache_dir: Path | None = None) -> None:
        self.detector: Detector
        self.recogniser: Recogniser
        if cache_dir is None:
            self.detector = Detector(OnnxNetwork(pack.detection.path), pack.detection, min_score)
            self.recogniser = Recogniser(OnnxNetwork(pack.recognition.path), pack.recognition)
        else:
            self.detector = RememberingDetector(pack.detection, cache_dir, min_score)
            self.recogniser = RememberingRecogniser(pack.recognition, cache_dir)

    def remember(self) -> None:
        for network in (self.detector, self.recogniser):
            if isinstance(network, RememberingDetector | RememberingRecogniser):
                network.memory.save()

    def embed(self, files: Sequence[Path]) -> tuple[Float, NDArray[np.bool_]]:
        """(n, d) unit vectors and (n,) whether a face was found; a photo without one has a zero vector, which is
        similar to nobody."""
        vectors = np.zeros((len(files), self.recogniser.dimension), np.float32)
        found = np.zeros(len(files), bool)
        for rows, crops in central_crops(self.detector, files, self.recogniser.alignment):
            vectors[rows] = self.recogniser.embed(crops)
            found[rows] = True
        return vectors, found

    def embed_people(
        self, listed: IdentityList, rows: NDArray[np.intp], aligned: bool
    ) -> tuple[Float, NDArray[np.bool_]]:
        """:meth:`embed` for some rows of a list of people's photos, by the largest face of each; ``aligned`` ones are
        crops already.

        Raises:
            ConfigError: a photo cannot be read, or is no crop.
        """
        vectors = np.zeros((len(rows), self.recogniser.dimension), np.float32)
        found = np.zeros(len(rows), bool)
        images = in_threads(listed.read, rows.tolist())
        for start in tqdm(range(0, len(rows), PEOPLE_BATCH), desc="embed", unit="batch"):
            batch = list(islice(images, PEOPLE_BATCH))
            crops = recut(_as_crops(batch), self.recogniser.alignment) if aligned else self._largest(batch)
            seen = start + np.flatnonzero([crop is not None for crop in crops])
            if len(seen):
                vectors[seen] = self.recogniser.embed(np.stack([crop for crop in crops if crop is not None]))
                found[seen] = True
        return vectors, found

    def _largest(self, photos: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8] | None]:
        return [
            align(photo, faces.landmarks_xy[faces.largest()][None], self.recogniser.alignment)[0]
            if len(faces)
            else None
            for photo, faces in zip(photos, self.detector.detect(photos), strict=True)
        ]

    def embeddings(self, files: Sequence[str], images: Path) -> Embeddings:
        """Files are relative to the ``images`` folder."""
        return Embeddings(tuple(files), *self.embed([images / file for file in files]))


def _as_crops(images: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    if any(image.shape[:2] != (CROP_SIZE_PX, CROP_SIZE_PX) for image in images):
        raise ConfigError("not all images are 112x112 crops; leave --aligned away to have faces found in them")
    return np.stack(images)


def central_crops(
    detector: Detector, files: Sequence[Path], alignment: Alignment
) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
    """Batches of rows of ``files`` that show a face, with the (b, size_px, size_px, 3) crops of the face nearest the
    centre."""
    for start in tqdm(range(0, len(files), BATCH), desc="detect and align", unit="batch"):
        images = [read_rgb(file) for file in files[start : start + BATCH]]
        rows, crops = [], []
        for row, (image, faces) in enumerate(zip(images, detector.detect(images), strict=True), start):
            if len(faces):
                centre = faces.nearest(image.shape[1] / 2, image.shape[0] / 2)
                crops.append(align(image, faces.landmarks_xy[centre : centre + 1], alignment)[0])
                rows.append(row)
        if crops:
            yield rows, np.stack(crops)


@dataclass(frozen=True, eq=False)
class CentralFace:
    """The face nearest the centre of a photo: ``landmarks_xy`` (5, 2) in the (H, W, 3) ``photo``, and what they say of
    it together with the aligned (112, 112, 3) ``crop``."""

    file: str
    photo: NDArray[np.uint8]
    landmarks_xy: Float
    crop: NDArray[np.uint8]
    quality: Quality


def central_faces(detector: Detector, files: Sequence[str], images: Path) -> Iterator[CentralFace]:
    """Of each photo that shows a face; files are relative to the ``images`` folder."""
    for start in tqdm(range(0, len(files), BATCH), desc="quality", unit="batch"):
        names = files[start : start + BATCH]
        photos = [read_rgb(images / name) for name in names]
        for name, photo, faces in zip(names, photos, detector.detect(photos), strict=True):
            if len(faces):
                points = faces.landmarks_xy[faces.nearest(photo.shape[1] / 2, photo.shape[0] / 2)]
                crop = align(photo, points[None])[0]
                yield CentralFace(name, photo, points, crop, measure(crop, points))


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Photos by file name, their (n, d) unit vectors, and (n,) whether a face was found; a photo without one has a
    zero vector, which is similar to nobody."""

    files: tuple[str, ...]
    vectors: Float
    found: NDArray[np.bool_]

    def rows(self, files: Sequence[str]) -> NDArray[np.intp]:
        row = {file: i for i, file in enumerate(self.files)}
        return np.array([row[file] for file in files], np.intp)

    def similarities(self, pairs: Pairs) -> Floats:
        """(P,) cosines."""
        a, b = self.vectors[self.rows(pairs.first)], self.vectors[self.rows(pairs.second)]
        return np.asarray(np.einsum("nd,nd->n", a, b, dtype=np.float64))


@dataclass(frozen=True)
class Verification:
    """``intervals``: 95 % over people, by figure; empty where there are no folds or nobody is named."""

    accuracy: FoldAccuracy
    tar_at_far_1e3: float
    eer: float
    photos_without_face: int
    tar_at_far_1e2: float
    auc: float
    intervals: dict[str, Interval] = field(default_factory=dict)


def verify(embeddings: Embeddings, pairs: Pairs) -> Verification:
    """LFW-protocol verification. With one fold (View 1) the threshold is chosen on the very pairs it judges: good for
    choosing settings, not for reporting."""
    unseen = int((~embeddings.found[np.unique(embeddings.rows((*pairs.first, *pairs.second)))]).sum())
    return verify_similarities(embeddings.similarities(pairs), pairs.same, pairs.folds, unseen, people_of(pairs.first))


def verify_similarities(
    similarities: Floats,
    same: NDArray[np.bool_],
    folds: Ints,
    photos_without_face: int = 0,
    people: NDArray[np.str_] | None = None,
) -> Verification:
    """(P,) similarities, whether each pair shows one person, its fold, and to whom it belongs in the bootstrap."""
    intervals = {}
    if len(np.unique(folds)) > 1:
        accuracy = fold_accuracy(similarities, same, folds)
        if people is not None:
            # A pair belongs to its first person. On LFW's sparse pairs this gives accuracy the width of the
            # dyadic-robust standard error (1.9 points for the bundled pack); the product of both gives 2.4.
            low, high = bootstrap(lambda rows: _pair_figures(similarities[rows], same[rows], folds[rows]), people)
            intervals = dict(zip(("accuracy", "tar_at_far_1e3", "eer"), _intervals(low, high), strict=True))
    else:
        value = float(((similarities >= best_threshold(similarities, same)) == same).mean())
        accuracy = FoldAccuracy(value, 0.0, (value,))
    return Verification(
        accuracy,
        tar_at_far(similarities, same, 1e-3),
        equal_error_rate(similarities, same),
        photos_without_face,
        tar_at_far(similarities, same, 1e-2),
        roc(similarities, same).auc,
        intervals,
    )


def _pair_figures(similarities: Floats, same: NDArray[np.bool_], folds: Ints) -> Floats:
    return np.array(
        [
            fold_accuracy(similarities, same, folds).mean,
            tar_at_far(similarities, same, 1e-3),
            equal_error_rate(similarities, same),
        ]
    )


def _intervals(low: Floats, high: Floats) -> list[Interval]:
    return list(zip(low.tolist(), high.tolist(), strict=True))


def people_of(files: Sequence[str]) -> NDArray[np.str_]:
    """(n,) whom each LFW file shows, by its folder."""
    return np.array([file.split("/")[0] for file in files])


@dataclass(frozen=True)
class OpenSetProtocol:
    """Who is enrolled (one photo a person), their other photos, and strangers: files relative to the images folder."""

    gallery: tuple[str, ...]
    mated: tuple[str, ...]
    strangers: tuple[str, ...]

    def mates(self) -> Ints:
        """(m,) each mated probe's row in the gallery."""
        row = {person: i for i, person in enumerate(people_of(self.gallery))}
        return np.array([row[person] for person in people_of(self.mated)], np.int64)


def read_open_set(path: Path) -> OpenSetProtocol:
    """Read openset_protocol.json.

    Raises:
        ConfigError: the file is absent.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    document = json.loads(path.read_text(encoding="utf-8"))
    return OpenSetProtocol(*(tuple(document[k]) for k in ("gallery", "mated_probes", "nonmated_probes")))


@dataclass(frozen=True)
class Identification(OpenSet):
    """An open set with 95 % intervals over the people who are searched for, the gallery as it is."""

    rank1_interval: Interval
    fnir_intervals: dict[float, Interval]
    fnir_without_doubtful: dict[float, float]
    """FNIR without :data:`DOUBTFUL_STRANGERS`."""


def identify(embeddings: Embeddings, protocol: OpenSetProtocol) -> Identification:
    """The 1:N open-set protocol: one enrolled photo a person, mated probes, strangers."""
    wide = embeddings.vectors.astype(np.float64)
    gallery, mated, strangers = (
        wide[embeddings.rows(f)] for f in (protocol.gallery, protocol.mated, protocol.strangers)
    )
    mates = protocol.mates()
    plain = open_set(gallery, mated, mates, strangers)
    hits, alarms = search(gallery, mated, mates, strangers)
    rates = tuple(plain.fnir)

    def figures(rows: Ints) -> Floats:
        drawn_hits, drawn_alarms = hits[rows[rows < len(hits)]], alarms[rows[rows >= len(hits)] - len(hits)]
        fnir = [fnir_at_fpir(drawn_hits, drawn_alarms, rate) for rate in rates]
        return np.array([(drawn_hits > -np.inf).mean(), *fnir])

    rank1, *fnir = _intervals(*bootstrap(figures, people_of((*protocol.mated, *protocol.strangers))))
    sure = ~np.isin(people_of(protocol.strangers), list(DOUBTFUL_STRANGERS))
    return Identification(
        plain.rank1,
        plain.fnir,
        plain.thresholds,
        rank1,
        dict(zip(rates, fnir, strict=True)),
        {rate: fnir_at_fpir(hits, alarms[sure], rate) for rate in rates},
    )


def files_of(lfw: Path, part: Part) -> set[str]:
    """The photos that the lists of one part name; ``lfw`` holds the lists."""
    if part == "open_set":
        protocol = read_open_set(lfw / "openset_protocol.json")
        return {*protocol.gallery, *protocol.mated, *protocol.strangers}
    names = ("pairs.txt",) if part == "view2" else ("pairsDevTrain.txt", "pairsDevTest.txt")
    lists = [read_pairs(lfw / name) for name in names]
    return {file for pairs in lists for file in (*pairs.first, *pairs.second)}


def split_view2(detector: Detector, embeddings: Embeddings, pairs: Pairs, lfw: Path) -> list[Split]:
    """View 2's pairs by what their photos are like, as this detector sees them."""
    similarities = embeddings.similarities(pairs)
    files = sorted({*pairs.first, *pairs.second})
    return splits(
        fold_decisions(similarities, pairs.same, pairs.folds),
        pairs.same,
        pairs.first,
        pairs.second,
        {face.file: face.quality for face in central_faces(detector, files, lfw / "images")},
        Counter(people_of(embeddings.files).tolist()),
    )


def worst_of(embeddings: Embeddings, pairs: Pairs) -> WorstPairs:
    """The pairs that similarities get most wrong."""
    seen = embeddings.found[embeddings.rows(pairs.first)] & embeddings.found[embeddings.rows(pairs.second)]
    return worst_pairs(embeddings.similarities(pairs), pairs.same, pairs.first, pairs.second, seen)


def evaluate_pack(
    pack: ModelPack, data: Path, view1_only: bool = False, cache_dir: Path | None = None
) -> dict[str, Any]:
    """Everything the model card states. ``data`` holds lfw/ and wider/ (see docs/training.md); what the networks answer
    is kept in ``cache_dir``, so that measuring again is quick."""
    embedder = Embedder(pack, cache_dir=cache_dir)
    lfw = data / "lfw"
    parts: tuple[Part, ...] = ("view1",) if view1_only else PARTS
    embeddings = embedder.embeddings(sorted(set().union(*(files_of(lfw, part) for part in parts))), lfw / "images")
    report: dict[str, Any] = {"lfw_view1": asdict(verify(embeddings, read_pairs(lfw / "pairsDevTest.txt")))}
    if not view1_only:
        pairs = read_pairs(lfw / "pairs.txt")
        report["lfw_view2"] = asdict(verify(embeddings, pairs))
        report["lfw_splits"] = [asdict(split) for split in split_view2(embedder.detector, embeddings, pairs, lfw)]
        report["lfw_worst_pairs"] = asdict(worst_of(embeddings, pairs))
        report["lfw_open_set"] = asdict(identify(embeddings, read_open_set(lfw / "openset_protocol.json")))
        report |= evaluate_detection(embedder.detector, data)
    embedder.remember()
    return report

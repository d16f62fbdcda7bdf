"""LFW: its lists, aligned crops, verification protocol and open-set protocol."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from models.checksums import sha256_of
from models.risk.search_rates import search_gallery
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import STANDARD_ALIGNMENT, Alignment
from models.vision.detection import DEFAULT_MIN_SCORE, Detector
from models.vision.specs import DetectionSpec
from training.config import ConfigError
from training.data.cache import cached_crops
from training.data.folders import read_list
from training.evaluation.embedding import Embed, Embeddings, Pairs, central_crops, embed_crops
from training.evaluation.metrics import (
    AngleStatistics,
    Bools,
    Floats,
    FoldAccuracy,
    Ints,
    OpenSetRates,
    angle_statistics,
    best_threshold,
    bootstrap,
    equal_error_rate,
    fold_accuracy,
    measure_open_set,
    roc,
    tar_at_far,
)

DOUBTFUL_STRANGERS: Final = frozenset(
    {"Sung_Hong_Choi", "Wang_Nan", "Mireya_Elisa_Moscoso_Rodriguez", "John_Gruden", "Carlos_Ruckauf"}
)
"""Non-mated probes of the open-set protocol with wrong labels in LFW.

Four are gallery people under another spelling; the photo of the fifth probably shows another person. They matter: one
in a thousand strangers is four.
"""
Interval = tuple[float, float]
Part = Literal["view1", "view2", "open_set"]
PARTS: Final[tuple[Part, ...]] = ("view1", "view2", "open_set")
VIEW1: Final[tuple[Part, ...]] = ("view1",)
log = logging.getLogger(__name__)
OPEN_SET_KEYS: Final = ("gallery", "mated_probes", "nonmated_probes")


def read_pairs(path: Path) -> Pairs:
    """Read pairs.txt (header: folds, pairs per kind) or a View 1 list (header: pairs per kind; one fold). Fields are
    separated by tabs; names may contain spaces. Raises ConfigError if the file is missing, a line is malformed, or
    lines are missing."""
    rows = [[field.strip() for field in line.split("\t")] for line in read_list(path).split("\n") if line.strip()]
    first, second, same = [], [], []
    try:
        fold_count, per_kind = map(int, rows[0] if len(rows[0]) == 2 else ["1", *rows[0]])
        pairs = rows[1 : 1 + 2 * fold_count * per_kind]
        if not 0 < len(pairs) == 2 * fold_count * per_kind:
            raise ValueError(f"{len(pairs)} pairs, and the header says {2 * fold_count * per_kind}")
        for row in pairs:
            one, a, other, b = row if len(row) == 4 else (*row[:2], row[0], *row[2:])
            first.append(_lfw_file(one, int(a)))
            second.append(_lfw_file(other, int(b)))
            same.append(len(row) == 3)
    except (IndexError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a list of pairs: {error}. Write the number of folds and of pairs per kind, then a person "
            "and two numbers, or a person, a number, another person and a number, separated by tabs, not by spaces"
        ) from error
    return Pairs(tuple(first), tuple(second), np.array(same), np.repeat(np.arange(fold_count), 2 * per_kind))


def _lfw_file(person: str, number: int) -> str:
    return f"{person}/{person}_{number:04d}.jpg"


@dataclass(frozen=True)
class OpenSetProtocol:
    """Enrolled photos (one per person), mated probes and strangers: files relative to the images folder."""

    gallery: tuple[str, ...]
    mated: tuple[str, ...]
    strangers: tuple[str, ...]

    def mates(self) -> Ints:
        """Return (m,) the gallery row of each mated probe. Raises ConfigError if a person has no gallery photo."""
        row = {person: i for i, person in enumerate(people_of(self.gallery))}
        if lost := [file for file in self.mated if file.split("/")[0] not in row]:
            raise ConfigError(
                f"{len(lost)} mated probes of the open-set protocol have no photo of their person in its gallery, "
                f"first {lost[0]}. Add one to gallery, or move the probes to nonmated_probes"
            )
        return np.array([row[person] for person in people_of(self.mated)], np.int64)


def read_open_set(path: Path) -> OpenSetProtocol:
    """Read openset_protocol.json. Raises ConfigError if the file is missing, is malformed, or has a mated probe
    without a gallery photo."""
    try:
        document = json.loads(read_list(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}. Fetch the protocol again") from error
    lists = [document.get(key) if isinstance(document, dict) else None for key in OPEN_SET_KEYS]
    for key, files in zip(OPEN_SET_KEYS, lists, strict=True):
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise ConfigError(f"{path}: {key} is not a list of photos. Write it as a list of person/photo.jpg")
    protocol = OpenSetProtocol(*(tuple(files or ()) for files in lists))
    protocol.mates()
    return protocol


def people_of(files: Sequence[str]) -> NDArray[np.str_]:
    """Return (n,) the person of each LFW file, from its folder."""
    return np.array([file.split("/")[0] for file in files])


def files_of(lfw: Path, part: Part) -> set[str]:
    """Return the photos named by the lists of one part. ``lfw`` contains the lists."""
    if part == "open_set":
        protocol = read_open_set(lfw / "openset_protocol.json")
        return {*protocol.gallery, *protocol.mated, *protocol.strangers}
    names = ("pairs.txt",) if part == "view2" else ("pairsDevTrain.txt", "pairsDevTest.txt")
    lists = [read_pairs(lfw / name) for name in names]
    return {file for pairs in lists for file in (*pairs.first, *pairs.second)}


@dataclass(frozen=True, eq=False)
class LfwCrops:
    """Aligned central faces of the LFW photos named by the lists of ``parts``.

    Attributes:
        root: folder with images/ and the lists.
        files: (n,) relative to images/.
        crops_NHWC: (n, size_px, size_px, 3) uint8 RGB, black if not ``found``.
        found: (n,) whether a face was found.
    """

    root: Path
    parts: tuple[Part, ...]
    files: tuple[str, ...]
    crops_NHWC: NDArray[np.uint8]
    found: Bools


def load_lfw_crops(
    root: Path,
    detection: DetectionSpec,
    cache_dir: Path,
    parts: Collection[Part] = PARTS,
    alignment: Alignment = STANDARD_ALIGNMENT,
) -> LfwCrops:
    """Align LFW with a pack's detector. Crops are cached in ``cache_dir`` as a memory map.

    Args:
        root: lfw/ of the research data.
        parts: View 1 alone needs a third of the photos.
        alignment: alignment of the evaluated recognizer.

    Raises:
        ConfigError: a list or photo is missing or unreadable.
    """
    parts = tuple(part for part in PARTS if part in parts)
    files = tuple(sorted(set().union(*(files_of(root, part) for part in parts))))
    paths = [root / "images" / file for file in files]
    if absent := [path for path in paths if not path.is_file()]:
        raise ConfigError(f"{len(absent)} photos of LFW's lists are missing, first {absent[0]}")
    identity = [f"{file} {path.stat().st_size}" for file, path in zip(files, paths, strict=True)]
    identity += [sha256_of(detection.path), str(detection.normalization), str(DEFAULT_MIN_SCORE), str(alignment)]

    def fill(crops_NHWC: NDArray[np.uint8]) -> Bools:
        found = np.zeros(len(paths), bool)
        detector = Detector(OnnxNetwork(detection.path), detection)
        for rows, crops in central_crops(detector, paths, alignment):
            crops_NHWC[rows] = crops
            found[rows] = True
        return found

    crops, found = cached_crops(cache_dir, "lfw", "\n".join(identity), len(paths), alignment.size_px, fill)
    return LfwCrops(root, parts, files, crops, found)


def embed_lfw(embed: Embed, crops: LfwCrops, flip: bool = False, parts: Collection[Part] | None = None) -> Embeddings:
    """Embed the photos of ``parts``, by default all. Photos without a face get zero vectors."""
    rows = np.arange(len(crops.files))
    if parts is not None and set(parts) < set(crops.parts):
        wanted = set().union(*(files_of(crops.root, part) for part in parts))
        rows = np.array([row for row in rows if crops.files[row] in wanted])
    seen = rows[crops.found[rows]]
    of_seen = embed_crops(embed, crops.crops_NHWC[seen], flip)
    vectors = np.zeros((len(crops.files), of_seen.shape[1]), np.float32)
    vectors[seen] = of_seen
    return Embeddings(tuple(crops.files[row] for row in rows), vectors[rows], crops.found[rows])


@dataclass(frozen=True)
class Verification:
    """Verification metrics, with 95 % intervals over people by figure. No intervals without folds or identities."""

    accuracy: FoldAccuracy
    tar_at_far_1e3: float
    eer: float
    photos_without_face: int
    tar_at_far_1e2: float
    auc: float
    others: int = 0
    """Pairs of different people."""
    intervals: dict[str, Interval] = field(default_factory=dict)


def verify(embeddings: Embeddings, pairs: Pairs, intervals: bool = True) -> Verification:
    """Run the LFW verification protocol. ``intervals``: resample people, the slowest part.

    With one fold (View 1) the threshold is chosen on the evaluated pairs: valid for selecting settings, not for
    reporting.
    """
    missing = int((~embeddings.found[np.unique(embeddings.rows((*pairs.first, *pairs.second)))]).sum())
    people = people_of(pairs.first) if intervals else None
    return verify_similarities(embeddings.similarities(pairs), pairs.same, pairs.folds, missing, people)


def verify_similarities(
    similarities: Floats,
    same: NDArray[np.bool_],
    folds: Ints,
    photos_without_face: int = 0,
    people: NDArray[np.str_] | None = None,
) -> Verification:
    """Compute verification metrics from similarities.

    Args:
        similarities: (P,) cosines.
        same: (P,) whether a pair shows one person.
        folds: (P,) fold of each pair.
        people: (P,) person of each pair for the bootstrap; None skips the intervals.
    """
    intervals, accuracy = {}, fold_accuracy(similarities, same, folds)
    if people is not None and len(accuracy.folds) > 1:
        # Assign each pair to its first person. On LFW's sparse pairs this matches the width of the dyadic-robust
        # standard error (1.9 points for the bundled pack); the product of both people gives 2.4.
        low, high = bootstrap(lambda rows: _pair_figures(similarities[rows], same[rows], folds[rows]), people)
        intervals = dict(zip(("accuracy", "tar_at_far_1e3", "eer"), _intervals(low, high), strict=True))
    return Verification(
        accuracy,
        tar_at_far(similarities, same, 1e-3),
        equal_error_rate(similarities, same),
        photos_without_face,
        tar_at_far(similarities, same, 1e-2),
        roc(similarities, same).auc,
        int((~same).sum()),
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


@dataclass(frozen=True)
class Identification(OpenSetRates):
    """Open-set metrics with 95 % intervals over the people of the probes, for a fixed gallery."""

    rank1_interval: Interval
    fnir_intervals: dict[float, Interval]
    fnir_without_doubtful: dict[float, float]
    """FNIR without `DOUBTFUL_STRANGERS`."""


def identify(embeddings: Embeddings, protocol: OpenSetProtocol) -> Identification:
    """Run the 1:N open-set protocol: one enrolled photo per person, mated probes, strangers."""
    vectors = embeddings.vectors.astype(np.float64)
    gallery, mated, strangers = (
        vectors[embeddings.rows(f)] for f in (protocol.gallery, protocol.mated, protocol.strangers)
    )
    hits, alarms = search_gallery(gallery, mated, protocol.mates(), strangers)
    rates_of_all = measure_open_set(hits, alarms)
    rates = tuple(rates_of_all.fnir)

    def figures(rows: Ints) -> Floats:
        drawn_hits, drawn_alarms = hits[rows[rows < len(hits)]], alarms[rows[rows >= len(hits)] - len(hits)]
        return measure_open_set(drawn_hits, drawn_alarms, rates).as_array()

    rank1, *fnir = _intervals(*bootstrap(figures, people_of((*protocol.mated, *protocol.strangers))))
    certain = ~np.isin(people_of(protocol.strangers), list(DOUBTFUL_STRANGERS))
    return Identification(
        **vars(rates_of_all),
        rank1_interval=rank1,
        fnir_intervals=dict(zip(rates, fnir, strict=True)),
        fnir_without_doubtful=measure_open_set(hits, alarms[certain], rates).fnir,
    )


@dataclass(frozen=True)
class View1:
    """Accuracy on pairsDevTest at the threshold of pairsDevTrain."""

    accuracy: float
    threshold: float


@dataclass(frozen=True, eq=False)
class LfwResult:
    """Folder of LFW's lists, embeddings of its photos, and results; None for skipped parts. ``angles`` covers people
    with at least two photos."""

    root: Path
    embeddings: Embeddings
    view1: View1 | None
    view2: Verification | None
    open_set: Identification | None
    angles: AngleStatistics

    def as_dict(self) -> dict[str, Any]:
        """Return the results, JSON-ready."""
        results = {name: getattr(self, name) for name in (*PARTS, "angles")}
        return {name: None if result is None else asdict(result) for name, result in results.items()}


def evaluate_lfw(
    embed: Embed,
    crops: LfwCrops,
    flip: bool = False,
    intervals: bool = True,
) -> LfwResult:
    """Evaluate a network on the parts of the crops. View 1 alone is several times faster, for model selection, and so
    is View 2 without ``intervals``."""
    log.info("LFW: embed up to %d photos, then compare them and resample people for intervals", len(crops.files))
    return evaluate_lfw_embeddings(embed_lfw(embed, crops, flip), crops.root, crops.parts, intervals)


def evaluate_lfw_embeddings(
    embeddings: Embeddings, root: Path, parts: Collection[Part] = PARTS, intervals: bool = True
) -> LfwResult:
    """Evaluate embeddings of LFW. ``root`` contains LFW's lists."""
    return LfwResult(
        root,
        embeddings,
        _evaluate_view1(embeddings, root) if "view1" in parts else None,
        verify(embeddings, read_pairs(root / "pairs.txt"), intervals) if "view2" in parts else None,
        identify(embeddings, read_open_set(root / "openset_protocol.json")) if "open_set" in parts else None,
        lfw_angles(embeddings),
    )


def _evaluate_view1(embeddings: Embeddings, root: Path) -> View1:
    train, test = (read_pairs(root / f"pairsDev{kind}.txt") for kind in ("Train", "Test"))
    threshold = best_threshold(embeddings.similarities(train), train.same)
    return View1(float(((embeddings.similarities(test) >= threshold) == test.same).mean()), threshold)


def lfw_angles(embeddings: Embeddings) -> AngleStatistics:
    """Return Intra and Inter of all people with at least two photos that show a face."""
    vectors = embeddings.vectors[embeddings.found]
    _, person, counts = np.unique(
        people_of(embeddings.files)[embeddings.found], return_inverse=True, return_counts=True
    )
    several = counts[person] >= 2
    return angle_statistics(vectors[several], person[several])

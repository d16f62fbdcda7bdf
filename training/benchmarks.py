"""Networks judged on the same aligned crops: LFW's lists, LFW-style .bin sets, IJB's template lists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.alignment import STANDARD, Alignment
from models.detection import Detector
from models.network import Float
from models.pack import DetectionSpec, sha256_of
from models.runtime import OnnxNetwork
from training.config import ConfigError
from training.data.cache import new_crops
from training.data.identities import IdentitySet
from training.data.verification import VerificationSet
from training.evaluate import (
    PARTS,
    Embeddings,
    Identification,
    Part,
    Verification,
    central_crops,
    files_of,
    identify,
    people_of,
    read_open_set,
    read_pairs,
    verify,
    verify_similarities,
)
from training.metrics import (
    AngleStatistics,
    Bools,
    Ints,
    angle_statistics,
    best_threshold,
    distractor_identification,
    distractor_verification,
    equal_error_rate,
    flip_average,
    tar_at_far,
    template_similarities,
    templates,
)

Embed = Callable[[NDArray[np.uint8]], Float]
"""(n, size_px, size_px, 3) uint8 RGB crops to (n, d) unit vectors: a pack's ``Recogniser.embed``, or a torch
network's."""
CROPS_AT_ONCE: Final = 64
BIN_FOLDS: Final = 10
DISTRACTOR_FARS: Final = (1e-3, 1e-4, 1e-5, 1e-6)
IJB_FARS: Final = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


@dataclass(frozen=True, eq=False)
class LfwCrops:
    """The central face of every LFW photo that the lists of ``parts`` name.

    ``root`` holds images/ and the lists; ``files`` are relative to images/; crops_NHWC (n, size_px, size_px, 3) uint8
    RGB, black where ``found`` (n,) is false.
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
    min_score: float = 0.5,
    alignment: Alignment = STANDARD,
) -> LfwCrops:
    """Align LFW by a pack's detector, once: later calls map the crops from ``cache_dir`` into memory.

    Args:
        root: lfw/ of the research data.
        detection: of the pack whose detector and landmarks are used.
        parts: View 1 alone has a third of the photos.
        min_score: faces below are not seen, in (0, 1].
        alignment: of the recogniser that is judged.

    Raises:
        ConfigError: a list or a photo is absent or unreadable.
    """
    parts = tuple(part for part in PARTS if part in parts)
    files = tuple(sorted(set().union(*(files_of(root, part) for part in parts))))
    paths = [root / "images" / file for file in files]
    if absent := [path for path in paths if not path.is_file()]:
        raise ConfigError(f"{absent[0]} does not exist, nor do {len(absent) - 1} other photos of LFW's lists")
    identity = [f"{file} {path.stat().st_size}" for file, path in zip(files, paths, strict=True)]
    identity += [sha256_of(detection.path), str(detection.normalisation), str(min_score), str(alignment)]
    key = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    cache, found_file = cache_dir / f"lfw-{key}.npy", cache_dir / f"lfw-found-{key}.npy"
    if not (cache.exists() and found_file.exists()):
        _build_cache(Detector(OnnxNetwork(detection.path), detection, min_score), paths, alignment, cache, found_file)
    return LfwCrops(root, parts, files, np.load(cache, mmap_mode="r"), np.load(found_file))


def _build_cache(detector: Detector, paths: list[Path], alignment: Alignment, cache: Path, found_file: Path) -> None:
    found = np.zeros(len(paths), bool)
    with new_crops(cache, found_file, len(paths), alignment.size_px) as (crops_NHWC, put_beside):
        for rows, crops in central_crops(detector, paths, alignment):
            crops_NHWC[rows] = crops
            found[rows] = True
        put_beside(found)


def embed_crops(embed: Embed, crops_NHWC: NDArray[np.uint8], flip: bool = False) -> Float:
    """(n, d) unit vectors of all crops, in batches; ``flip`` averages each with its mirror image's."""
    vectors = []
    for start in range(0, len(crops_NHWC), CROPS_AT_ONCE):
        batch = np.ascontiguousarray(crops_NHWC[start : start + CROPS_AT_ONCE])
        plain = embed(batch)
        vectors.append(flip_average(plain, embed(np.ascontiguousarray(batch[:, :, ::-1]))) if flip else plain)
    return np.concatenate(vectors).astype(np.float32)


def embed_lfw(embed: Embed, crops: LfwCrops, flip: bool = False, parts: Collection[Part] | None = None) -> Embeddings:
    """Embed the photos of ``parts``, all by default; photos without a face become zero vectors."""
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
class View1:
    """Accuracy on pairsDevTest with the threshold chosen on pairsDevTrain, and with the best one in hindsight."""

    accuracy: float
    threshold: float
    best_accuracy: float


@dataclass(frozen=True)
class Judgement:
    """What LFW says of a network; None for parts that were not judged. ``angles``: Intra and Inter over the judged
    photos of people who have two or more of them."""

    view1: View1 | None
    view2: Verification | None
    open_set: Identification | None
    angles: AngleStatistics

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def judge(embed: Embed, crops: LfwCrops, flip: bool = False, parts: Collection[Part] | None = None) -> Judgement:
    """A network judged on LFW; View 1 alone, for choosing between networks, is several times quicker."""
    return judge_embeddings(embed_lfw(embed, crops, flip, parts), crops.root, crops.parts if parts is None else parts)


def judge_embeddings(embeddings: Embeddings, root: Path, parts: Collection[Part] = PARTS) -> Judgement:
    """The same from vectors; ``root`` holds LFW's lists."""
    return Judgement(
        _judge_view1(embeddings, root) if "view1" in parts else None,
        verify(embeddings, read_pairs(root / "pairs.txt")) if "view2" in parts else None,
        identify(embeddings, read_open_set(root / "openset_protocol.json")) if "open_set" in parts else None,
        lfw_angles(embeddings),
    )


def _judge_view1(embeddings: Embeddings, root: Path) -> View1:
    chosen_on, judged_on = (read_pairs(root / f"pairsDev{kind}.txt") for kind in ("Train", "Test"))
    threshold = best_threshold(embeddings.similarities(chosen_on), chosen_on.same)
    similarities = embeddings.similarities(judged_on)
    hindsight = best_threshold(similarities, judged_on.same)
    accuracy, best = (float(((similarities >= t) == judged_on.same).mean()) for t in (threshold, hindsight))
    return View1(accuracy, threshold, best)


def lfw_angles(embeddings: Embeddings) -> AngleStatistics:
    """Intra and Inter of everybody with two photos or more in which a face was found."""
    vectors = embeddings.vectors[embeddings.found]
    _, person, counts = np.unique(
        people_of(embeddings.files)[embeddings.found], return_inverse=True, return_counts=True
    )
    several = counts[person] >= 2
    return angle_statistics(vectors[several], person[several])


def judge_bin(embed: Embed, pairs: VerificationSet, flip: bool = False) -> Verification:
    """A network judged on an LFW-style .bin set: pairs lie side by side, in ten contiguous folds as InsightFace's.
    Such a set names nobody: no intervals.

    Raises:
        ConfigError: the set lacks pairs of one kind.
    """
    if pairs.same.all() or not pairs.same.any():
        raise ConfigError("a verification set needs pairs of one person and pairs of two")
    vectors = embed_crops(embed, pairs.crops_NHWC, flip)
    similarities = np.einsum("nd,nd->n", vectors[0::2], vectors[1::2], dtype=np.float64)
    folds = np.concatenate([np.full(len(f), i) for i, f in enumerate(np.array_split(pairs.same, BIN_FOLDS))])
    return verify_similarities(similarities, pairs.same, folds)


@dataclass(frozen=True)
class Distraction:
    """MegaFace's protocol: ``rank1`` by the number of distractors, ``tar_at_far`` by the FAR."""

    rank1: dict[int, float]
    tar_at_far: dict[float, float]


def judge_distractors(embed: Embed, probes: IdentitySet, distractors_NHWC: NDArray[np.uint8]) -> Distraction:
    """A network judged as MegaFace does, with 10, 100, ... and all distractors, which are nobody of ``probes``.

    Raises:
        ConfigError: nobody in the probe set has two photos.
    """
    vectors = embed_crops(embed, probes.crops_NHWC).astype(np.float64)
    others = embed_crops(embed, distractors_NHWC).astype(np.float64)
    others = np.random.default_rng(0).permutation(others)
    sizes = [*(10**k for k in range(1, 7) if 10**k < len(others)), len(others)]
    try:
        rank1 = distractor_identification(vectors, probes.labels, others, sizes)[:, 0]
    except ValueError as error:
        raise ConfigError(f"the probe set: {error}") from error
    tar = distractor_verification(vectors, probes.labels, others, DISTRACTOR_FARS)
    return Distraction(
        dict(zip(sizes, rank1.tolist(), strict=True)), dict(zip(DISTRACTOR_FARS, tar.tolist(), strict=True))
    )


@dataclass(frozen=True)
class TemplateVerification:
    """IJB's 1:1 protocol over templates."""

    tar_at_far: dict[float, float]
    eer: float
    pairs: int
    photos_without_face: int


def judge_ijb(embed: Embed, detector: Detector, folder: Path, alignment: Alignment = STANDARD) -> TemplateVerification:
    """A network judged on a folder as IJB-B and IJB-C are shared for research: ``meta/*face_tid_mid.txt``,
    ``meta/*template_pair_label.txt`` and the photos in ``loose_crop/``. The face nearest a photo's centre counts;
    photos without one are left out of their templates.

    Raises:
        ConfigError: a list or a photo is absent or malformed, or a template of the pairs has no photo with a face.
    """
    media = read_ijb_media(_one(folder / "meta", "*face_tid_mid.txt"))
    pairs = read_ijb_pairs(_one(folder / "meta", "*template_pair_label.txt"))
    kept, vectors = [], []
    for rows, crops in central_crops(detector, [folder / "loose_crop" / file for file in media.files], alignment):
        kept += rows
        vectors.append(embed(crops))
    if not kept:
        raise ConfigError(f"{folder}: no photo shows a face")
    ids, by_template = templates(np.concatenate(vectors), media.template_ids[kept], media.media_ids[kept])
    try:
        similarities = template_similarities(ids, by_template, pairs.templates)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error} with a face") from error
    return TemplateVerification(
        {far: tar_at_far(similarities, pairs.same, far) for far in IJB_FARS},
        equal_error_rate(similarities, pairs.same),
        len(pairs.same),
        len(media.files) - len(kept),
    )


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ConfigError(f"{folder} must hold one file {pattern}, not {len(found)}")
    return found[0]


@dataclass(frozen=True, eq=False)
class IjbMedia:
    """face_tid_mid.txt: image ``files``, and the template and medium of each, (n,)."""

    files: tuple[str, ...]
    template_ids: Ints
    media_ids: Ints


@dataclass(frozen=True, eq=False)
class IjbPairs:
    """template_pair_label.txt: ``templates`` (P, 2) ids, ``same`` (P,) whether both show one person."""

    templates: Ints
    same: Bools


def read_ijb_media(path: Path) -> IjbMedia:
    """Lines of "file template medium".

    Raises:
        ConfigError: the file is absent or malformed.
    """
    table = _read_table(path, np.dtype([("file", "U64"), ("template", np.int64), ("medium", np.int64)]))
    return IjbMedia(tuple(table["file"].tolist()), table["template"], table["medium"])


def read_ijb_pairs(path: Path) -> IjbPairs:
    """Lines of "template template label", 1 for the same person and 0 for different people.

    Raises:
        ConfigError: the file is absent or malformed.
    """
    table = _read_table(path, np.dtype([("templates", np.int64, 2), ("label", np.int64)]))
    if not np.isin(table["label"], (0, 1)).all():
        raise ConfigError(f"{path}: a label is neither 0 nor 1")
    return IjbPairs(table["templates"], table["label"] == 1)


def _read_table(path: Path, columns: np.dtype[np.void]) -> NDArray[np.void]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    try:
        return np.atleast_1d(np.loadtxt(path, columns, comments=None, encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error

"""Benchmarks beside LFW: .bin verification sets, MegaFace's distractors, IJB templates, videos, Trillion-Pairs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float
from models.vision.alignment import STANDARD_ALIGNMENT, Alignment, realign_crops, standard_crop_px
from models.vision.detection import Detector
from training.config import ConfigError, DataConfig
from training.data.identities import IdentitySet, load_identities
from training.data.verification import VerificationSet, read_bin
from training.evaluation.embedding import Embed, central_crops, embed_crops, given_crops
from training.evaluation.lfw import Verification, verify_similarities
from training.evaluation.metrics import (
    Floats,
    Ints,
    build_templates,
    distractor_identification,
    distractor_verification,
    tar_at_far,
    template_similarities,
)
from training.evaluation.protocols import TemplateSearch, search_templates
from training.evaluation.trillion_pairs import evaluate_trillion_pairs
from training.evaluation.videos import VideoEmbedder, evaluate_iqiyi, evaluate_ytf

BIN_FOLDS: Final = 10
DISTRACTOR_FARS: Final = (1e-3, 1e-4, 1e-5, 1e-6)
IJB_FARS: Final = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


@dataclass(frozen=True)
class Benchmarks:
    """Data sets to measure on.

    Attributes:
        bins: LFW-style .bin sets.
        ijb: IJB folder.
        probes: MegaFace protocol: folder with one folder of photos per person.
        distractors: folder of other people, one folder per person or in MegaFace's layout ``a1/a2/photo``.
        refined: file that lists photos of both folders to leave out.
        ytf: folder of YouTube Faces.
        iqiyi: folder of iQIYI-VID.
        trillion_pairs: folder of Trillion-Pairs, with ``testdata_lmk.txt``.
        features: file for the embeddings of Trillion-Pairs.
        frames: frames of a video that count.
    """

    bins: Sequence[Path] = ()
    ijb: Path | None = None
    probes: Path | None = None
    distractors: Path | None = None
    refined: Path | None = None
    ytf: Path | None = None
    iqiyi: Path | None = None
    trillion_pairs: Path | None = None
    features: Path | None = None
    frames: int = 20

    def __bool__(self) -> bool:
        return any((self.bins, self.ijb, self.probes, self.ytf, self.iqiyi, self.trillion_pairs))


def evaluate_other_benchmarks(
    embed: Embed,
    alignment: Alignment,
    detector: Detector,
    cache: Path,
    named: Benchmarks,
    flip: bool = False,
    weigh: Embed | None = None,
) -> list[tuple[str, str]]:
    """Evaluate an embedder on the given benchmarks and return rows of names and values.

    Args:
        flip: average with the mirror image.
        weigh: embedder without normalization, whose lengths weight the photos of IJB's templates.
    """

    def embed_standard(crops: NDArray[np.uint8]) -> Float:
        return embed(realign_crops(crops, alignment))

    rows = []
    for path in named.bins:
        rows += _verification_rows(path.stem, evaluate_bin(embed_standard, read_bin(path), flip))
    if named.ijb is not None:
        rows += _ijb_rows(named.ijb.name, evaluate_ijb(weigh or embed, detector, named.ijb, alignment, flip))
    if named.probes is not None and named.distractors is not None:
        side = standard_crop_px(alignment)
        photos = DataConfig(named.probes, None, aligned=False, crop_px=side, min_images=1, exclude=named.refined)
        probes = load_identities(photos, cache, detector)
        photos = replace(photos, root=named.distractors, person_folders=2)
        distractors = load_identities(photos, cache, detector)
        rank1, tar_at = evaluate_megaface(embed_standard, probes, distractors.crops_NHWC, flip)
        rows += [(f"Rank-1 among {size:,} distractors", f"{share:.2%}") for size, share in rank1.items()]
        rows += [(f"TAR at FAR {far:g} among distractors", f"{tar:.2%}") for far, tar in tar_at.items()]
    videos = VideoEmbedder(embed, alignment, detector, named.frames, flip)
    if named.ytf is not None:
        found = evaluate_ytf(videos, named.ytf)
        rows += _verification_rows("YouTube Faces", found)
        rows.append(("YouTube Faces videos without a face", str(found.photos_without_face)))
    if named.iqiyi is not None:
        searched = evaluate_iqiyi(videos, named.iqiyi)
        counts = f"{searched.people:,} people, {searched.videos:,} videos"
        rows.append(("iQIYI-VID MAP", f"{searched.mean_average_precision:.2%} ({counts})"))
        rows.append(("iQIYI-VID videos without a face", str(searched.videos_without_face)))
    if named.trillion_pairs is not None:
        measured = evaluate_trillion_pairs(embed, named.trillion_pairs, alignment, flip, named.features)
        if measured is not None:
            rows.append(("Trillion-Pairs identification at FPR 1e-3", f"{measured.identification:.2%}"))
            rows.append(("Trillion-Pairs verification at FPR 1e-9", f"{measured.verification:.2%}"))
        if named.features is not None:
            rows.append(("Trillion-Pairs embeddings", str(named.features)))
    return rows


def _verification_rows(name: str, found: Verification) -> list[tuple[str, str]]:
    return [
        (f"{name} accuracy", f"{found.accuracy.mean:.2%} ± {found.accuracy.std:.2%}"),
        (f"{name} TAR at FAR 0.1 %", tar_or_reason(found.tar_at_far_1e3, 1e-3, found.others)),
    ]


def tar_or_reason(tar: float, far: float, others: int) -> str:
    """Return a TAR as text, or why a set with this number of pairs of different people is too small for it."""
    if far * others >= 1:
        return f"{tar:.2%}"
    return f"too small: needs {round(1 / far):,} pairs of different people, not {others:,}"


def _ijb_rows(name: str, found: IjbResult) -> list[tuple[str, str]]:
    rows = [
        (f"{name} TAR at FAR {far:g}", tar_or_reason(tar, far, found.others)) for far, tar in found.tar_at_far.items()
    ]
    if found.search is not None:
        rows.append((f"{name} 1:N rank 1", f"{found.search.rank1:.2%}"))
        rows += [(f"{name} TPIR at FPIR {fpir:g}", f"{tpir:.2%}") for fpir, tpir in found.search.tpir.items()]
    return [*rows, (f"{name} photos without a face", str(found.photos_without_face))]


def evaluate_bin(embed: Embed, pairs: VerificationSet, flip: bool = False) -> Verification:
    """Evaluate on an LFW-style .bin set, in ten contiguous folds as InsightFace does.

    There are no intervals, since the sets do not identify people. Raises ConfigError if all pairs are of one kind.
    """
    if pairs.same.all() or not pairs.same.any():
        raise ConfigError("A verification set needs same-person and different-person pairs")
    vectors = embed_crops(embed, pairs.crops_NHWC, flip)
    similarities = np.einsum("nd,nd->n", vectors[0::2], vectors[1::2], dtype=np.float64)
    folds = np.concatenate([np.full(len(f), i) for i, f in enumerate(np.array_split(pairs.same, BIN_FOLDS))])
    return verify_similarities(similarities, pairs.same, folds)


def evaluate_megaface(
    embed: Embed, probes: IdentitySet, distractors_NHWC: NDArray[np.uint8], flip: bool = False
) -> tuple[dict[int, float], dict[float, float]]:
    """Run the MegaFace protocol with 10, 100, ... and all distractors. Return rank-1 by number of distractors, and TAR
    by FAR. Raises ConfigError if no person in the probe set has two photos."""
    vectors = embed_crops(embed, probes.crops_NHWC, flip).astype(np.float64)
    others = embed_crops(embed, distractors_NHWC, flip).astype(np.float64)
    others = np.random.default_rng(0).permutation(others)
    sizes = [*(10**k for k in range(1, 7) if 10**k < len(others)), len(others)]
    try:
        rank1 = distractor_identification(vectors, probes.labels, others, sizes)
    except ValueError as error:
        raise ConfigError(f"the probe set: {error}") from error
    tar = distractor_verification(vectors, probes.labels, others, DISTRACTOR_FARS)
    return dict(zip(sizes, rank1.tolist(), strict=True)), dict(zip(DISTRACTOR_FARS, tar.tolist(), strict=True))


@dataclass(frozen=True)
class IjbResult:
    """Metrics of IJB over templates: 1:1, and the means over both galleries of 1:N if the folder has their lists."""

    tar_at_far: dict[float, float]
    others: int
    """Pairs of different people."""
    photos_without_face: int
    search: TemplateSearch | None = None


def evaluate_ijb(
    embed: Embed, detector: Detector, folder: Path, alignment: Alignment = STANDARD_ALIGNMENT, flip: bool = False
) -> IjbResult:
    """Evaluate on a folder in the research layout of IJB-B and IJB-C.

    The folder contains ``meta/*face_tid_mid.txt``, ``meta/*template_pair_label.txt`` and photos in ``loose_crop/``.
    With ``meta/*name_5pts_score.txt``, its landmarks are used, and its scores weight the photos of a template.
    Otherwise the face nearest a photo's center is used, and photos without a face are left out. With
    ``meta/*1N_gallery_G1.csv``, ``..._G2.csv`` and ``meta/*1N_probe_mixed.csv``, templates are searched, too. Raises
    ConfigError if a list or photo is missing or malformed, or a template has no photo with a face.

    Args:
        embed: an embedder without normalization weights the photos of a template by the length of their embedding.
        flip: add the embedding of the mirror image.
    """
    meta = folder / "meta"
    columns = [("file", "U64"), ("template", np.int64), ("medium", np.int64)]
    media = _read_table(_find_one(meta, "*face_tid_mid.txt"), columns)
    pairs = read_ijb_pairs(_find_one(meta, "*template_pair_label.txt"))
    files, same = media["file"].tolist(), pairs["same"] == 1
    photos = [folder / "loose_crop" / file for file in files]
    given = _read_landmarks(meta, files)
    batches = (
        central_crops(detector, photos, alignment)
        if given is None
        else given_crops(photos, given["landmarks"], alignment)
    )
    kept, vectors = [], []
    for rows, crops in batches:
        kept += rows
        mirrored = embed(np.ascontiguousarray(crops[:, :, ::-1])) if flip else 0.0
        vectors.append(embed(crops) + mirrored)
    if not kept:
        raise ConfigError(f"{folder}: no photo has a detected face")
    weighted = np.concatenate(vectors)
    if given is not None:
        weighted = weighted * given["score"][kept, None]
    ids, by_template = build_templates(weighted, media["template"][kept], media["medium"][kept])
    try:
        similarities = template_similarities(ids, by_template, pairs["templates"])
    except ValueError as error:
        raise ConfigError(f"{folder}: {error} with a face") from error
    return IjbResult(
        {far: tar_at_far(similarities, same, far) for far in IJB_FARS},
        int((~same).sum()),
        len(files) - len(kept),
        _search_ijb(meta, ids, by_template),
    )


def _read_landmarks(meta: Path, files: Sequence[str]) -> NDArray[np.void] | None:
    """Read lines of "file x1 y1 ... x5 y5 score" in the order of ``files``, or return None without that list."""
    if not list(meta.glob("*name_5pts_score.txt")):
        return None
    path = _find_one(meta, "*name_5pts_score.txt")
    table = _read_table(path, [("file", "U64"), ("landmarks", np.float64, (5, 2)), ("score", np.float64)])
    if table["file"].tolist() != list(files):
        raise ConfigError(f"{path} lists other photos than the list of templates")
    return table


def _search_ijb(meta: Path, ids: Ints, templates: Floats) -> TemplateSearch | None:
    galleries = sorted(meta.glob("*1N_gallery_G*.csv"))
    if not galleries:
        return None
    probes = _read_subjects(_find_one(meta, "*1N_probe_mixed.csv"), ids)
    found = []
    for path in galleries:
        gallery = _read_subjects(path, ids)
        found.append(search_templates(templates[gallery[0]], gallery[1], templates[probes[0]], probes[1]))
    means = {
        fpir: float(np.mean([each.tpir[fpir] for each in found]))
        for fpir in found[0].tpir
        if all(each.tpir for each in found)
    }
    return TemplateSearch(float(np.mean([each.rank1 for each in found])), means)


def _read_subjects(path: Path, ids: Ints) -> tuple[Ints, Ints]:
    """Return the row in ascending ``ids`` and the subject of each template of a list."""
    with path.open(newline="", encoding="utf-8") as stream:
        rows = {(int(row["TEMPLATE_ID"]), int(row["SUBJECT_ID"])) for row in csv.DictReader(stream)}
    table = np.array(sorted(rows), np.int64).reshape(-1, 2)
    places = np.minimum(np.searchsorted(ids, table[:, 0]), len(ids) - 1)
    if (unknown := ids[places] != table[:, 0]).any():
        raise ConfigError(f"{path}: template {table[unknown][0, 0]} has no photo with a face")
    return places.astype(np.int64), table[:, 1]


def _find_one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ConfigError(f"{folder} must contain exactly one file {pattern}, but has {len(found)}")
    return found[0]


def read_ijb_pairs(path: Path) -> NDArray[np.void]:
    """Read template_pair_label.txt, lines of "template template same", as (P,) rows with the fields ``templates`` (two
    ids) and ``same``, 0 or 1. Raises ConfigError if the file is missing or malformed."""
    table = _read_table(path, [("templates", np.int64, 2), ("same", np.int64)])
    if not np.isin(table["same"], (0, 1)).all():
        raise ConfigError(f"{path}: labels must be 0 or 1")
    return table


def _read_table(path: Path, columns: list[Any]) -> NDArray[np.void]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    try:
        return np.atleast_1d(np.loadtxt(path, np.dtype(columns), comments=None, encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error

"""Benchmarks beside LFW: .bin verification sets, MegaFace's distractors, IJB templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float
from models.vision.alignment import STANDARD_ALIGNMENT, Alignment, realign_crops
from models.vision.detection import Detector
from training.config import ConfigError, DataConfig
from training.data.identities import IdentitySet, load_identities
from training.data.verification import VerificationSet, read_bin
from training.evaluation.embedding import Embed, central_crops, embed_crops
from training.evaluation.lfw import Verification, verify_similarities
from training.evaluation.metrics import (
    Bools,
    Ints,
    build_templates,
    distractor_identification,
    distractor_verification,
    equal_error_rate,
    tar_at_far,
    template_similarities,
)

BIN_FOLDS: Final = 10
DISTRACTOR_FARS: Final = (1e-3, 1e-4, 1e-5, 1e-6)
IJB_FARS: Final = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


def evaluate_other_benchmarks(
    embed: Embed,
    alignment: Alignment,
    detector: Detector,
    cache: Path,
    bins: Sequence[Path] = (),
    ijb: Path | None = None,
    probes: Path | None = None,
    distractors: Path | None = None,
) -> list[tuple[str, str]]:
    """Evaluate an embedder on the given benchmarks and return rows of names and values.

    Args:
        bins: LFW-style .bin sets.
        ijb: IJB folder.
        probes: MegaFace protocol: folder with one folder of photos per person.
        distractors: folder of other people, in the same layout.
    """

    def embed_standard(crops: NDArray[np.uint8]) -> Float:
        return embed(realign_crops(crops, alignment))

    rows = []
    for path in bins:
        found = evaluate_bin(embed_standard, read_bin(path))
        rows.append((f"{path.stem} accuracy", f"{found.accuracy.mean:.2%} ± {found.accuracy.std:.2%}"))
        rows.append((f"{path.stem} TAR at FAR 0.1 %", f"{found.tar_at_far_1e3:.1%}"))
    if ijb is not None:
        templates = evaluate_ijb(embed, detector, ijb, alignment)
        rows += [(f"{ijb.name} TAR at FAR {far:g}", f"{tar:.2%}") for far, tar in templates.tar_at_far.items()]
        rows.append((f"{ijb.name} photos without a face", str(templates.photos_without_face)))
    if probes is not None and distractors is not None:
        probe_set, distractor_set = (
            load_identities(DataConfig(root, None, aligned=False, min_images=1), cache, detector)
            for root in (probes, distractors)
        )
        megaface = evaluate_megaface(embed_standard, probe_set, distractor_set.crops_NHWC)
        rows += [(f"Rank-1 among {size:,} distractors", f"{share:.2%}") for size, share in megaface.rank1.items()]
        rows += [(f"TAR at FAR {far:g} among distractors", f"{tar:.2%}") for far, tar in megaface.tar_at_far.items()]
    return rows


def evaluate_bin(embed: Embed, pairs: VerificationSet) -> Verification:
    """Evaluate on an LFW-style .bin set, in ten contiguous folds as InsightFace does.

    There are no intervals, since the sets do not identify people. Raises ConfigError if all pairs are of one kind.
    """
    if pairs.same.all() or not pairs.same.any():
        raise ConfigError("A verification set needs same-person and different-person pairs")
    vectors = embed_crops(embed, pairs.crops_NHWC)
    similarities = np.einsum("nd,nd->n", vectors[0::2], vectors[1::2], dtype=np.float64)
    folds = np.concatenate([np.full(len(f), i) for i, f in enumerate(np.array_split(pairs.same, BIN_FOLDS))])
    return verify_similarities(similarities, pairs.same, folds)


@dataclass(frozen=True)
class MegafaceResult:
    """MegaFace metrics: ``rank1`` by number of distractors, ``tar_at_far`` by FAR."""

    rank1: dict[int, float]
    tar_at_far: dict[float, float]


def evaluate_megaface(embed: Embed, probes: IdentitySet, distractors_NHWC: NDArray[np.uint8]) -> MegafaceResult:
    """Run the MegaFace protocol with 10, 100, ... and all distractors. Raises ConfigError if no person in the probe set
    has two photos."""
    vectors = embed_crops(embed, probes.crops_NHWC).astype(np.float64)
    others = embed_crops(embed, distractors_NHWC).astype(np.float64)
    others = np.random.default_rng(0).permutation(others)
    sizes = [*(10**k for k in range(1, 7) if 10**k < len(others)), len(others)]
    try:
        rank1 = distractor_identification(vectors, probes.labels, others, sizes)[:, 0]
    except ValueError as error:
        raise ConfigError(f"the probe set: {error}") from error
    tar = distractor_verification(vectors, probes.labels, others, DISTRACTOR_FARS)
    return MegafaceResult(
        dict(zip(sizes, rank1.tolist(), strict=True)), dict(zip(DISTRACTOR_FARS, tar.tolist(), strict=True))
    )


@dataclass(frozen=True)
class IjbResult:
    """Metrics of IJB's 1:1 protocol over templates."""

    tar_at_far: dict[float, float]
    eer: float
    pairs: int
    photos_without_face: int


def evaluate_ijb(
    embed: Embed, detector: Detector, folder: Path, alignment: Alignment = STANDARD_ALIGNMENT
) -> IjbResult:
    """Evaluate on a folder in the research layout of IJB-B and IJB-C.

    The folder contains ``meta/*face_tid_mid.txt``, ``meta/*template_pair_label.txt`` and photos in ``loose_crop/``. The
    face nearest a photo's center is used. Photos without a face are excluded from their templates. Raises ConfigError
    if a list or photo is missing or malformed, or a template has no photo with a face.
    """
    media = read_ijb_media(_find_one(folder / "meta", "*face_tid_mid.txt"))
    pairs = read_ijb_pairs(_find_one(folder / "meta", "*template_pair_label.txt"))
    kept, vectors = [], []
    for rows, crops in central_crops(detector, [folder / "loose_crop" / file for file in media.files], alignment):
        kept += rows
        vectors.append(embed(crops))
    if not kept:
        raise ConfigError(f"{folder}: no photo has a detected face")
    ids, by_template = build_templates(np.concatenate(vectors), media.template_ids[kept], media.media_ids[kept])
    try:
        similarities = template_similarities(ids, by_template, pairs.templates)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error} with a face") from error
    return IjbResult(
        {far: tar_at_far(similarities, pairs.same, far) for far in IJB_FARS},
        equal_error_rate(similarities, pairs.same),
        len(pairs.same),
        len(media.files) - len(kept),
    )


def _find_one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ConfigError(f"{folder} must contain exactly one file {pattern}, but has {len(found)}")
    return found[0]


@dataclass(frozen=True, eq=False)
class IjbMedia:
    """Content of face_tid_mid.txt: image files, and the (n,) template and medium of each."""

    files: tuple[str, ...]
    template_ids: Ints
    media_ids: Ints


@dataclass(frozen=True, eq=False)
class IjbPairs:
    """Content of template_pair_label.txt: (P, 2) template ids, and (P,) whether both show one person."""

    templates: Ints
    same: Bools


def read_ijb_media(path: Path) -> IjbMedia:
    """Read lines of "file template medium". Raises ConfigError if the file is missing or malformed."""
    table = _read_table(path, np.dtype([("file", "U64"), ("template", np.int64), ("medium", np.int64)]))
    return IjbMedia(tuple(table["file"].tolist()), table["template"], table["medium"])


def read_ijb_pairs(path: Path) -> IjbPairs:
    """Read lines of "template template label", label 1 for the same person and 0 otherwise. Raises ConfigError if the
    file is missing or malformed."""
    table = _read_table(path, np.dtype([("templates", np.int64, 2), ("label", np.int64)]))
    if not np.isin(table["label"], (0, 1)).all():
        raise ConfigError(f"{path}: labels must be 0 or 1")
    return IjbPairs(table["templates"], table["label"] == 1)


def _read_table(path: Path, columns: np.dtype[np.void]) -> NDArray[np.void]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    try:
        return np.atleast_1d(np.loadtxt(path, columns, comments=None, encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error

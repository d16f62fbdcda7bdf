"""Protocols of face benchmarks over vectors: Trillion-Pairs, iQIYI-VID, IJB 1:N; the pairs of YouTube Faces."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.risk.search_rates import search_gallery, threshold_at_fpir
from training.config import ConfigError
from training.data.folders import read_list
from training.evaluation.embedding import Pairs
from training.evaluation.metrics import Bools, Floats, Ints, distractor_verification, mated_pairs, row_blocks

MAX_RETRIEVED = 100


@dataclass(frozen=True)
class TrillionPairs:
    """Share of same-person pairs above the thresholds of identification and verification."""

    identification: float
    verification: float


def trillion_pairs(
    probes: Floats, people: Ints, distractors: Floats, identification_fpr: float = 1e-3, verification_fpr: float = 1e-9
) -> TrillionPairs:
    """Return the metrics of DeepGlint's Trillion-Pairs challenge.

    The verification threshold accepts ``verification_fpr`` of all probe-distractor pairs. The identification threshold
    is reached by the nearest distractor of ``identification_fpr`` of the probes; the nearest candidate must be a mate.

    Args:
        probes: (n, d) unit vectors.
        people: (n,) person of each.
        distractors: (D, d) unit vectors of other people. Their similarities are computed in blocks.

    Raises:
        ValueError: no person has two probes.
    """
    nearest = np.concatenate(
        [(probes[rows] @ distractors.T).max(1) for rows in row_blocks(len(probes), len(distractors))]
    )
    threshold = threshold_at_fpir(nearest, identification_fpr)
    first, second = mated_pairs(people)
    if not len(first):
        raise ValueError("no person has two photos")
    similarities = np.einsum("nd,nd->n", probes[first], probes[second])
    # Each photo of a pair searches for the other.
    identified = [(similarities >= threshold) & (similarities > nearest[probe]) for probe in (first, second)]
    verified = distractor_verification(probes, people, distractors, [verification_fpr])[0]
    return TrillionPairs(float(np.mean(identified)), float(verified))


def mean_average_precision(similarity_QG: Floats, relevant_QG: Bools, retrieved: int = MAX_RETRIEVED) -> float:
    """Return iQIYI-VID's MAP: mean over people of the mean precision at the rank of each of their videos.

    Y. Liu et al., "iQIYI-VID: a large dataset for multi-modal person identification", 2018, section 5. Videos
    beyond the first ``retrieved`` of a person count as missed.

    Args:
        similarity_QG: (Q, G) of people to videos.
        relevant_QG: whether a video shows the person; every person has one.
    """
    order = np.argsort(-similarity_QG, axis=1, kind="stable")[:, :retrieved]
    hits = np.take_along_axis(relevant_QG, order, axis=1)
    precision = np.cumsum(hits, axis=1) / np.arange(1, order.shape[1] + 1)
    return float(((precision * hits).sum(1) / relevant_QG.sum(1)).mean())


@dataclass(frozen=True)
class TemplateSearch:
    """IJB 1:N: closed-set ``rank1``, and TPIR by FPIR over probes with and without a mate."""

    rank1: float
    tpir: dict[float, float]


def search_templates(
    gallery: Floats, gallery_people: Ints, probes: Floats, probe_people: Ints, fpirs: Sequence[float] = (0.1, 0.01)
) -> TemplateSearch:
    """Search a gallery of one template per person with the templates of people inside and outside of it.

    Args:
        gallery, probes: (G, d) and (P, d) unit vectors.
        gallery_people, probe_people: (G,) and (P,) subjects; probes of others than the gallery's are non-mated.

    Raises:
        ConfigError: no probe shows a person of the gallery.
    """
    row_of = {int(person): row for row, person in enumerate(gallery_people)}
    inside = np.isin(probe_people, gallery_people)
    if not inside.any():
        raise ConfigError(
            f"none of the {len(inside)} probes of the 1:N search shows a person of the gallery. Check that the lists "
            "of the gallery and of the probes belong to one set, with the same SUBJECT_ID"
        )
    mates = np.array([row_of[int(person)] for person in probe_people[inside]], np.int64)
    similarity = probes[inside] @ gallery.T
    above = (similarity >= similarity[np.arange(len(mates)), mates][:, None]).sum(1)  # ties count against the mate
    tpir = {}
    if not inside.all():
        hits, alarms = search_gallery(gallery, probes[inside], mates, probes[~inside])
        tpir = {fpir: float((hits >= threshold_at_fpir(alarms, fpir)).mean()) for fpir in fpirs}
    return TemplateSearch(float((above == 1).mean()), tpir)


def read_video_pairs(path: Path) -> Pairs:
    """Read splits.txt of YouTube Faces: pairs of videos. A line has the fold first, both videos as person/number, and
    last 1 for the same person, otherwise 0. Raises ConfigError if it is missing or malformed."""
    rows = [[field.strip() for field in row] for row in csv.reader(read_list(path).splitlines()) if row]
    try:
        folds = [int(row[0]) for row in rows[1:]]
        same = [{"0": False, "1": True}[row[-1]] for row in rows[1:]]
        videos = [(first, second) for first, second in ([x for x in row if "/" in x] for row in rows[1:])]
    except (IndexError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is not a list of pairs: {type(error).__name__} {error}") from error
    if len(set(same)) != 2:
        raise ConfigError(f"{path} needs pairs of the same person and of different people")
    first, second = zip(*videos, strict=True)
    return Pairs(first, second, np.array(same), np.array(folds, np.int64))

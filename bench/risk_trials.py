"""Galleries drawn from the sets of `bench.risk_photos`, and what their thresholds do to strangers and to mated probes.

Evidence, risk, thresholds and decisions are those of the service.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from bench.risk_photos import DEGRADATIONS, QUALITY, Faces
from models.risk.calibration import Calibration, fmr_for_fpir
from models.risk.gallery_risk import GalleryRisk
from models.risk.miss_rate import promised_misses
from models.runtime.network import Float
from service.domain.fusion import fuse_similarities
from service.domain.gallery import GallerySettings, Snapshot
from service.domain.outcomes import RiskTarget
from service.risk.decision import decide, score_candidates
from service.risk.evidence import impostor_evidence
from service.risk.gallery_risks import impostor_risk
from service.risk.search import DEPTH
from service.risk.threshold import ImpostorRisk, Thresholds, thresholds_for
from training.evaluation.metrics import Floats, Ints

FPIR: Final = (0.1, 0.01, 0.003, 0.001)
FIXED: Final = 0.4
"""Fixed threshold of InsightFace's own server, for any gallery."""
SETTINGS: Final = GallerySettings()
MAX_PEOPLE_ALL_PHOTOS: Final = 1000
"""People in a set from which strangers are searched with all of their photos; in larger sets, with one."""
Group = Literal["LFW", "CFP", "other collections", "degraded"]


@dataclass(frozen=True)
class Domain:
    """Sets that are enrolled and searched. ``mated``: that of the enrolled people's probes; None: no other photos of
    them exist. ``cells``: templates per subject, and numbers of subjects. Views: beginnings of the photos' names."""

    name: str
    group: Group
    enrolled: str
    mated: str | None
    strangers: str
    cells: tuple[tuple[int, tuple[int, ...]], ...]
    enrolled_view: str = ""
    mated_view: str = ""
    strangers_view: str = ""


ONE_GALLERY: Final = ((1, (300,)), (2, (300,)))
DOMAINS: Final = (
    Domain(
        *("LFW", "LFW", "lfw", "lfw", "lfw"),
        ((1, (5, 12, 25, 50, 100, 300, 1000, 2000)), (2, (5, 12, 25, 50, 300, 600)), (3, (5, 12, 25, 50, 300))),
    ),
    Domain(
        *("CFP, frontal", "CFP", "cfp", "cfp", "cfp", tuple((t, (5, 12, 25, 50, 250)) for t in (1, 2, 3))),
        *(3 * ("frontal/",)),
    ),
    Domain(
        *("CFP, profiles searched", "CFP", "cfp", "cfp", "cfp", tuple((t, (250,)) for t in (1, 2, 3))),
        *("frontal/", "profile/", "profile/"),
    ),
    Domain("LFW, frontal CFP searched", "CFP", "lfw", "cfp", "cfp", ONE_GALLERY, "", "frontal/", "frontal/"),
    Domain("LFW, profiles searched", "CFP", "lfw", "cfp", "cfp", ONE_GALLERY, "", "profile/", "profile/"),
    Domain("LFW, strangers of All-Age-Faces", "other collections", "lfw", "lfw", "aaf", ONE_GALLERY),
    Domain("LFW, strangers of FairFace", "other collections", "lfw", "lfw", "fairface", ONE_GALLERY),
    Domain("All-Age-Faces", "other collections", "aaf", None, "aaf", ((1, (12, 25, 100, 400)),)),
    Domain("FairFace", "other collections", "fairface", None, "fairface", ((1, (12, 25, 100, 400)),)),
    *(Domain(f"LFW, {name}", "degraded", "lfw", name, name, ((1, (300,)),)) for name in DEGRADATIONS),
)


@dataclass(frozen=True)
class Outcome:
    """One drawn gallery at one requested FPIR. FNIR are NaN if the enrolled people have no other photos.

    ``fixed_fpir`` is for the cosine `FIXED`, ``hindsight_fnir`` for the lowest threshold on the raw similarity that
    keeps the FPIR for these strangers, and ``promised_fnir`` is the service's.
    """

    templates: int
    people: int
    fpir: float
    threshold: float
    measured_fpir: float
    fixed_fpir: float
    fnir: float
    hindsight_fnir: float
    promised_fnir: float


@dataclass(frozen=True, eq=False)
class Draw:
    """A drawn gallery, subject 0 first; ``mated`` probes of its subjects, (m,) ``mates``; and of ``strangers``, (s,)
    ``persons``."""

    snapshot: Snapshot
    mated: Float
    mates: Ints
    strangers: Float
    persons: NDArray[np.str_]


def draws(
    sets: Mapping[str, Faces], domain: Domain, templates: int, size: int, count: int, seed: int
) -> Iterator[Draw]:
    """Yield random galleries of ``size`` people of a domain.

    People without probes fill large galleries, and half of a gallery whose probes come from another set.
    """
    faces = sets[domain.enrolled]
    enrolled = rows_by_person(faces, domain.enrolled_view)
    probes = {}
    if domain.mated is not None:
        used = {photo for rows in enrolled.values() for photo in faces.photos[rows[:templates]].tolist()}
        probes = rows_by_person(sets[domain.mated], domain.mated_view, used)
    able = sorted(person for person, rows in enrolled.items() if len(rows) >= templates)
    searched = [person for person in able if person in probes]
    others = [person for person in able if person not in probes]
    for number in range(count):
        rng = np.random.default_rng((seed + number, templates, size))
        first = rng.permutation(len(searched))[: size if domain.mated == domain.enrolled else size // 2]
        rest = rng.permutation(len(others))[: size - len(first)]
        people = [*(searched[i] for i in first), *(others[i] for i in rest)]
        yield drawn(sets, domain, people, [enrolled[person][:templates] for person in people], probes)


def drawn(
    sets: Mapping[str, Faces], domain: Domain, people: list[str], rows: list[Ints], probes: Mapping[str, Ints]
) -> Draw:
    """Return the gallery of ``people``, enrolled with the ``rows`` of each."""
    faces, found, enrolled = sets[domain.enrolled], sets[domain.strangers], set(people)
    snapshot = Snapshot(
        len(people),
        np.arange(sum(map(len, rows))),
        np.repeat(np.arange(len(people)), [len(some) for some in rows]),
        faces.vectors[np.concatenate(rows)],
        faces.quality[np.concatenate(rows), QUALITY.index("score")],
    )
    mates = np.repeat(np.arange(len(people)), [len(probes.get(person, ())) for person in people])
    mated = np.concatenate([np.empty(0, np.int64), *(probes[person] for person in people if person in probes)])
    strangers = rows_by_person(found, domain.strangers_view)
    most = 1 if len(strangers) > MAX_PEOPLE_ALL_PHOTOS else None
    unknown = np.concatenate([some[:most] for person, some in strangers.items() if person not in enrolled])
    own = faces.vectors if domain.mated is None else sets[domain.mated].vectors
    return Draw(snapshot, own[mated], mates, found.vectors[unknown], found.people[unknown])


def rows_by_person(faces: Faces, view: str, without: Collection[str] = ()) -> dict[str, Ints]:
    """Return the rows of each person's photos of a view, except some photos."""
    found: dict[str, list[int]] = {}
    for row, (person, photo) in enumerate(zip(faces.people.tolist(), faces.photos.tolist(), strict=True)):
        if photo.startswith(view) and photo not in without:
            found.setdefault(person, []).append(row)
    return {person: np.array(rows) for person, rows in found.items()}


def risk_of(snapshot: Snapshot, calibration: Calibration | None) -> tuple[GalleryRisk, ImpostorRisk]:
    """Return the risk model that the service derives of a gallery."""
    risk = GalleryRisk(impostor_evidence(snapshot), calibration)
    return risk, impostor_risk(risk, "gallery" if calibration is None else "both")


def judge(draw: Draw, calibration: Calibration | None) -> list[Outcome]:
    """Derive the gallery's risk, search for all probes, and compare requested with measured FPIR."""
    risk, known = risk_of(draw.snapshot, calibration)
    size = len(np.unique(draw.snapshot.subject_pks))
    alarms, mated = (search(draw.snapshot, probes) for probes in (draw.strangers, draw.mated))
    weights = equal_weights(draw.persons)
    shares = equal_weights(draw.mates)
    found_first = mated.subjects[:, 0] == draw.mates
    outcomes = []
    for fpir in FPIR:
        thresholds = thresholds_for(RiskTarget("fpir", fpir), known, size)
        named = identified(alarms, thresholds, known, size) >= 0
        own = identified(mated, thresholds, known, size) == draw.mates
        hindsight = found_first & (mated.similarities[:, 0] > hindsight_threshold(alarms, weights, fpir))
        cut = risk.curve.threshold_at_fmr(fmr_for_fpir(fpir, size)).value
        promised = promised_misses(risk.evidence, calibration, cut)
        measured, fixed = (float(weights @ alarm) for alarm in (named, alarms.similarities[:, 0] >= FIXED))
        fnir, least = (1 - float(shares @ found) if len(own) else math.nan for found in (own, hindsight))
        templates, told = len(draw.snapshot.vectors) // size, math.nan if promised is None else promised.value
        outcomes.append(Outcome(templates, size, fpir, thresholds.accept, measured, fixed, fnir, least, told))
    return outcomes


def group_rates(
    faces: Faces,
    groups: Mapping[str, str],
    calibration: Calibration | None,
    size: int,
    fpir: float,
    seeds: Sequence[int],
) -> dict[str, float]:
    """Return the measured FPIR of strangers of each group, in galleries drawn from all groups.

    Args:
        groups: group of each photo. Photos without a group are left out.
    """
    rows = np.array([row for row, photo in enumerate(faces.photos.tolist()) if photo in groups])
    names = np.array([groups.get(photo, "") for photo in faces.photos.tolist()])
    named: dict[str, list[float]] = defaultdict(list)
    for seed in seeds:
        order = np.random.default_rng((seed, size)).permutation(rows)
        enrolled, strangers = order[:size], order[size:]
        keys, quality = np.arange(size), faces.quality[enrolled, QUALITY.index("score")]
        snapshot = Snapshot(size, keys, keys, faces.vectors[enrolled], quality)
        _, known = risk_of(snapshot, calibration)
        thresholds = thresholds_for(RiskTarget("fpir", fpir), known, size)
        alarms = identified(search(snapshot, faces.vectors[strangers]), thresholds, known, size) >= 0
        for group in set(groups.values()):
            named[group].append(float(alarms[names[strangers] == group].mean()))
    return {group: float(np.mean(rates)) for group, rates in named.items()}


@dataclass(frozen=True, eq=False)
class Searches:
    """The (q, k) most similar subjects of each probe, and their similarities."""

    subjects: Ints
    similarities: Floats


def search(snapshot: Snapshot, probes: Float) -> Searches:
    """Search by brute force, as deep as the service."""
    if not len(probes):
        return Searches(np.empty((0, 2), np.int64), np.empty((0, 2)))
    fused = fuse_similarities(probes, snapshot.vectors, snapshot.subject_pks, snapshot.qualities)
    depth = min(DEPTH, fused.shape[1])
    nearest = np.argpartition(-fused, depth - 1, axis=1)[:, :depth]
    similarities = np.take_along_axis(fused, nearest, 1)
    order = np.argsort(-similarities, axis=1, kind="stable")
    return Searches(
        np.take_along_axis(nearest, order, 1), np.take_along_axis(similarities, order, 1).astype(np.float64)
    )


def identified(searches: Searches, thresholds: Thresholds, known: ImpostorRisk, size: int) -> Ints:
    """Return (q,) the subject that the service identifies, -1 for no one."""
    found = []
    for subjects, similarities in zip(searches.subjects.tolist(), searches.similarities.tolist(), strict=True):
        candidates = score_candidates(list(zip(subjects, similarities, strict=True)), thresholds, known, size)
        decision = decide(candidates, thresholds)
        found.append(candidates[0].subject_pk if decision.outcome == "identified" else -1)
    return np.array(found, np.int64)


def hindsight_threshold(alarms: Searches, weights: Floats, fpir: float) -> float:
    """Return the largest similarity that must stay below the threshold to keep the FPIR for these strangers."""
    best = alarms.similarities[:, 0]
    order = np.argsort(-best)
    above = np.cumsum(weights[order])
    return float(best[order[min(len(best) - 1, int(np.searchsorted(above, fpir, "right")))]])


def equal_weights(persons: NDArray[np.generic]) -> Floats:
    """Return weights of probes with sum 1, in which each person has the same share."""
    if not len(persons):
        return np.empty(0)
    _, person, count = np.unique(persons, return_inverse=True, return_counts=True)
    return np.asarray(1 / count[person] / len(count), np.float64)

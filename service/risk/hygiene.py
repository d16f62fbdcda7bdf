"""Gallery hygiene: duplicate subjects, mislabeled templates and lookalikes. Pure functions.

The templates of a subject form groups: connected components of the graph of similar templates. The largest group, of
equally large ones that least like another subject, is the core and shows the subject; templates of other groups are
strays. Groups of different subjects are compared by the
mean similarity of their templates, which equals the product of their mean vectors, adjusted by their next similar
subjects. The odds that two groups show one person follow from the gallery's own scores (:mod:`models.risk.pair_odds`).

Only cores make duplicates, so one stray does not make two subjects duplicates. A subject whose only template shows
another person cannot be distinguished from a duplicate, and is reported as one.

The comparison is exact, in blocks of BLOCK_ROWS (times: bench/results/hygiene.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kith.wire.common import HygieneKind
from models.risk.calibration import EDGES, Calibration, Ints, count_at_or_above
from models.risk.impostor_evidence import ImpostorEvidence
from models.risk.pair_odds import PairOdds, bounded
from models.runtime.network import Float
from service.domain.findings import KINDS, HygieneFinding, HygieneReport
from service.domain.gallery import Snapshot
from service.risk.evidence import MAX_PROBES, impostor_evidence

BLOCK_ROWS: Final = 1024
MAX_NEIGHBORS: Final = 5
"""Neighbors kept for each group."""
DUPLICATE_ODDS: Final = 1.0
"""Odds from which a pair of subjects is reported as one person."""
MISLABELED_ODDS: Final = 0.1
"""Odds from which templates are reported as mislabeled: a template costs less to check than a pair of subjects."""
LOOKALIKE_ODDS: Final = 0.1
"""Odds from which a pair of subjects is reported as lookalikes."""
MAX_NEAREST: Final = 10
"""Nearest pairs in a report besides the findings, however small their odds."""
MISLABELED_SHARE: Final = 0.02
"""Prior share of templates of another person, half of them of subjects of the gallery."""
UNLIKE_FNMR: Final = 0.01
UNLIKE_FMR: Final = 0.001
"""Templates of one subject below both similarities are not linked into one group."""
SIMILARITY_DIGITS: Final = 4
"""Decimal places of similarities in the report."""


@dataclass(frozen=True, eq=False)
class TemplateGroup:
    """Rows of similar templates of one subject.

    ``own`` is the highest similarity to the subject's other templates, None without others. ``core`` marks the group
    that shows the subject.
    """

    subject: int
    rows: Ints
    own: float | None
    core: bool


@dataclass(frozen=True)
class Neighbor:
    """Group of another subject: its row, mean similarity, and rival-adjusted score."""

    row: int
    similarity: float
    score: float


Neighbors = list[list[Neighbor]]


def find_problems(snapshot: Snapshot, calibration: Calibration) -> HygieneReport:
    """Inspect all templates of a gallery."""
    unlike = min(calibration.curve.threshold_at_fmr(UNLIKE_FMR).value, calibration.threshold_at_fnmr(UNLIKE_FNMR))
    groups = [
        group for rows in _rows_by_subject(snapshot.subject_pks) for group in _group_templates(snapshot, rows, unlike)
    ]
    subjects = np.array([group.subject for group in groups], np.int64)
    if len(np.unique(subjects)) < 2:
        return HygieneReport([], [], None)
    means = np.stack([snapshot.vectors[group.rows].mean(0) for group in groups])
    shown = _shown_rows(groups)
    known = np.full(len(shown), np.nan, np.float32)
    # One row per subject, of which the length counts: the mean similarity of its photos, not the cosine of their mean.
    cores = Snapshot(0, shown, subjects[shown], means[shown], known)
    evidence = impostor_evidence(cores, lambda means, *_: means, with_levels=False)
    odds = PairOdds.of(evidence, calibration, _halves(snapshot, groups))
    near = _score(groups, _neighbors(means, subjects, _usual_level(evidence)), odds, evidence)
    groups = _with_one_core(groups, near)
    pairs = list(_pair_findings(groups, snapshot, near, odds))
    found = [pair for pair in pairs if pair.odds is not None and pair.odds >= LOOKALIKE_ODDS]
    nearest = pairs[len(found) :]
    twice = {frozenset(pair.subjects) for pair in found if pair.kind == "duplicate_subjects"}
    found += _mislabeled(snapshot, groups, near, twice, means, odds)
    return HygieneReport(sorted(found, key=sort_key), nearest, odds.recall(DUPLICATE_ODDS))


def sort_key(finding: HygieneFinding) -> tuple[int, int, int, int]:
    """Return the sort key of a finding.

    It uses the rounded confidence, so that the key is the same in every report that has the finding: the order of
    additions changes the last digits.
    """
    first, second = (*finding.templates, 0)[:2]
    return KINDS.index(finding.kind), -round(finding.rank * 10**SIMILARITY_DIGITS), first, second


def _rows_by_subject(subject_pks: Ints) -> list[Ints]:
    order = np.argsort(subject_pks, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(subject_pks[order])) + 1) if len(order) else []


def _group_templates(snapshot: Snapshot, rows: Ints, unlike: float) -> list[TemplateGroup]:
    """Return the groups of a subject's templates; each of the largest is a core."""
    subject = int(snapshot.subject_pks[rows[0]])
    similarities = snapshot.vectors[rows] @ snapshot.vectors[rows].T
    labels = _components(similarities >= unlike)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    largest = max(len(member) for member in members)
    return [
        TemplateGroup(
            subject,
            rows[member],
            None if len(members) == 1 else float(np.delete(similarities[member], member, 1).max()),
            len(member) == largest,
        )
        for member in members
    ]


def _components(linked: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Label the connected components of a symmetric (n, n) adjacency matrix: (n,) smallest row of each component."""
    labels = np.arange(len(linked))
    linked = linked | np.eye(len(linked), dtype=bool)
    while True:
        spread = np.where(linked, labels[None], len(linked)).min(1)
        if (spread == labels).all():
            return labels
        labels = spread


def _shown_rows(groups: list[TemplateGroup]) -> Ints:
    """Return the first core of each subject."""
    first: dict[int, int] = {}
    for row, group in enumerate(groups):
        if group.core:
            first.setdefault(group.subject, row)
    return np.array(list(first.values()), np.int64)


def _halves(snapshot: Snapshot, groups: list[TemplateGroup]) -> NDArray[np.float64]:
    """Return the mean similarity between two halves of each core with several templates, of MAX_PROBES at most."""
    cores = [group.rows for group in groups if group.core and len(group.rows) > 1][:MAX_PROBES]
    vectors = snapshot.vectors
    return np.array([float(vectors[rows[::2]].mean(0) @ vectors[rows[1::2]].mean(0)) for rows in cores])


def _usual_level(evidence: ImpostorEvidence) -> float:
    """Return the similarity that every subject reaches with MAX_NEIGHBORS others on average."""
    above = count_at_or_above(evidence.pairs)
    share = MAX_NEIGHBORS / (evidence.subjects - 1)
    return -1.0 if share >= 1 else float(np.interp(-share, -above / above[0], EDGES))


def _neighbors(means: Float, subjects: Ints, level: float) -> list[list[tuple[int, float]]]:
    """Return each group's nearest groups of other subjects at or above ``level``, nearest first."""
    firsts, seconds, values = [], [], []
    for start in range(0, len(means), BLOCK_ROWS):
        block = means[start : start + BLOCK_ROWS] @ means[start:].T
        rows, columns = np.divmod(np.flatnonzero(block >= level), block.shape[1])
        # Each pair once, without pairs of the same subject.
        kept = (columns > rows) & (subjects[start + rows] != subjects[start + columns])
        rows, columns = rows[kept], columns[kept]
        firsts.append(start + rows)
        seconds.append(start + columns)
        values.append(block[rows, columns])
    pairs = np.concatenate([np.concatenate(firsts + seconds), np.concatenate(seconds + firsts)]).reshape(2, -1)
    similarity = np.tile(np.concatenate(values), 2)
    order = np.lexsort((pairs[1], -similarity, pairs[0]))
    ends = np.searchsorted(pairs[0][order], np.arange(len(means) + 1))
    return [
        [(int(pairs[1, i]), float(similarity[i])) for i in order[first : min(last, first + MAX_NEIGHBORS)]]
        for first, last in pairwise(ends.tolist())
    ]


def _score(
    groups: list[TemplateGroup], near: list[list[tuple[int, float]]], odds: PairOdds, evidence: ImpostorEvidence
) -> Neighbors:
    """Adjust the similarities of neighbors by the next similar subjects of both."""
    level = _usual_level(evidence)

    def runner_up(row: int, subject: int) -> float:
        others = (s for other, s in near[row] if groups[other].subject != subject and groups[other].core)
        return next(others, level)

    def scored(row: int, other: int, similarity: float) -> Neighbor:
        rivals = runner_up(row, groups[other].subject), runner_up(other, groups[row].subject)
        return Neighbor(other, similarity, odds.adjusted(similarity, rivals))

    return [[scored(row, other, similarity) for other, similarity in others] for row, others in enumerate(near)]


def _with_one_core(groups: list[TemplateGroup], near: Neighbors) -> list[TemplateGroup]:
    """Keep of a subject's cores the one that is least like another subject, of equal ones the first."""
    likeness = [max((n.score for n in others), default=-1.0) for others in near]
    kept: dict[int, int] = {}
    for row, group in enumerate(groups):
        if group.core and likeness[row] < likeness[kept.setdefault(group.subject, row)]:
            kept[group.subject] = row
    return [replace(group, core=kept[group.subject] == row) for row, group in enumerate(groups)]


def _core_pairs(groups: list[TemplateGroup], near: Neighbors) -> list[tuple[tuple[int, int], Neighbor]]:
    """Return each pair of neighboring cores once, the best score first."""
    pairs = dict[tuple[int, int], Neighbor]()
    for row, others in enumerate(near):
        for neighbor in others:
            if groups[row].core and groups[neighbor.row].core:
                pairs.setdefault((min(row, neighbor.row), max(row, neighbor.row)), neighbor)
    return sorted(pairs.items(), key=lambda one: (-round(one[1].score * 10**SIMILARITY_DIGITS), one[0]))


def _pair_findings(
    groups: list[TemplateGroup], snapshot: Snapshot, near: Neighbors, odds: PairOdds
) -> Iterator[HygieneFinding]:
    """Return the pairs of cores from LOOKALIKE_ODDS, then the nearest of the others."""
    others = 0
    for (first, second), neighbor in _core_pairs(groups, near):
        a, b = groups[first], groups[second]
        one = odds.odds(neighbor.score)
        kind: HygieneKind = "duplicate_subjects" if one >= DUPLICATE_ODDS else "lookalikes"
        templates, chance = _most_similar_templates(snapshot, a, b), odds.chance(neighbor.score)
        subjects = (a.subject, b.subject)
        yield HygieneFinding(kind, subjects, templates, ACTIONS[kind], neighbor.score, neighbor.similarity, chance, one)
        others += one < LOOKALIKE_ODDS
        if others == MAX_NEAREST:
            return


def _most_similar_templates(snapshot: Snapshot, a: TemplateGroup, b: TemplateGroup) -> tuple[int, int]:
    between = snapshot.vectors[a.rows] @ snapshot.vectors[b.rows].T
    i, j = np.unravel_index(int(between.argmax()), between.shape)
    return int(snapshot.template_pks[a.rows[i]]), int(snapshot.template_pks[b.rows[j]])


ACTIONS: Final = {
    "duplicate_subjects": "Compare the two photos. If they show one person, merge the subjects. If one subject has a "
    "single photo, that photo may be mislabeled instead.",
    "lookalikes": "Compare the photos of these two similar people. Use a stricter risk where it matters, or enroll "
    "better photos of both.",
    "move": "Compare the photo with those of the other subject. If they show the same person, move it there.",
    "delete": "Compare the photo with the subject's other photos. If it shows another person, delete it. If its "
    "quality is poor, enroll a better one.",
}


def _mislabeled(
    snapshot: Snapshot,
    groups: list[TemplateGroup],
    near: Neighbors,
    twice: set[frozenset[int]],
    means: Float,
    odds: PairOdds,
) -> Iterator[HygieneFinding]:
    """Return strays that more probably show another subject or a stranger than their own subject."""
    cores = {group.subject: row for row, group in enumerate(groups) if group.core}
    for row, group in enumerate(groups):
        if group.core:
            continue
        there = max(near[row], key=lambda n: n.score, default=None)
        if there is not None and {group.subject, groups[there.row].subject} in twice:
            continue  # the two subjects are one person, so no template needs to move
        right = (1 - MISLABELED_SHARE) * odds.ratio(_own_score(row, cores[group.subject], means, near, odds))
        elsewhere = odds.ratio(there.score) / (odds.subjects - 1) if there is not None else 0.0
        wrong = MISLABELED_SHARE / 2 * (1 + elsewhere) / right
        if wrong < MISLABELED_ODDS:
            continue
        found = HygieneFinding(
            "mislabeled_template",
            (group.subject,),
            tuple(int(pk) for pk in snapshot.template_pks[group.rows]),
            ACTIONS["delete"],
            math.log(wrong),
            odds=bounded(wrong),
            own_similarity=group.own,
        )
        if there is not None and elsewhere >= 1:
            home, chance = groups[there.row].subject, odds.chance(there.score)
            found = replace(
                found,
                subjects=(group.subject, home),
                action=ACTIONS["move"],
                similarity=there.similarity,
                chance=chance,
                belongs_to=home,
            )
        yield found


def _own_score(row: int, core: int, means: Float, near: Neighbors, odds: PairOdds) -> float:
    """Return the score of a stray and the core of its subject."""
    similarity = float(means[row] @ means[core])
    if odds.rival is None:
        return similarity
    rivals = [near[one][0].similarity if near[one] else odds.rival for one in (row, core)]
    return odds.adjusted(similarity, (rivals[0], rivals[1]))

"""Gallery hygiene: duplicate subjects, mislabeled templates, inconsistent subjects and lookalikes. Pure functions.

The templates of a subject form groups: connected components of the graph of similar templates. The largest group is
the core and shows the subject; templates of other groups are strays. Groups of different subjects are compared by the
mean similarity of their templates, which equals the product of their mean vectors.

Only cores make duplicates, so one stray does not make two subjects duplicates. A subject whose only template shows
another person cannot be distinguished from a duplicate, and is reported as one.

The comparison is exact, in blocks of BLOCK_ROWS. With two templates per subject, 10,000 subjects take about a second of
one core, 100,000 half a minute and a gigabyte (bench/hygiene.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from models.risk.calibration import Calibration
from models.runtime.network import Float
from service.domain.gallery import Snapshot

HygieneKind = Literal["duplicate_subjects", "mislabeled_template", "inconsistent_subject", "lookalikes"]
KINDS: Final[tuple[HygieneKind, ...]] = (
    "duplicate_subjects",
    "mislabeled_template",
    "inconsistent_subject",
    "lookalikes",
)
"""Kinds in the order of the report."""
BLOCK_ROWS: Final = 1024
MAX_NEIGHBORS: Final = 5
"""Neighbors kept for each group."""
DUPLICATE_PROBABILITY: Final = 0.01
"""Accepted probability that a subject with one photo has a false duplicate: one false pair per 200 subjects.

Means of several photos vary less, so false pairs are rarer then. Chosen in bench/hygiene.py."""
NEAR_PROBABILITY: Final = 0.1
"""Same probability for strays and lookalikes. It is higher, because a stray probably belongs to another subject."""
UNLIKE_FNMR: Final = 0.01
UNLIKE_FMR: Final = 0.001
SIMILARITY_DIGITS: Final = 4
"""Decimal places of similarities in the report."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class HygieneThresholds:
    """Similarity thresholds of a gallery.

    - ``duplicate``: cores at or above are one person.
    - ``near``: strays at or above belong to that subject.
    - ``lookalike``: cores from here to ``duplicate`` are people who may be confused.
    - ``unlike``: templates of a subject below are not linked into one group.
    """

    duplicate: float
    near: float
    lookalike: float
    unlike: float

    @classmethod
    def of(cls, calibration: Calibration, subjects: int, accept: float = 1.0) -> HygieneThresholds:
        """Derive the thresholds for a gallery of ``subjects``.

        Subjects at ``accept``, the identification threshold, are lookalikes too, unless chance alone gives every
        subject several of them.
        """
        others = max(1, subjects - 1)

        def at(chance: float) -> float:
            return calibration.threshold_at_fmr(min(1.0, chance / others)).similarity

        unlike = min(calibration.threshold_at_fmr(UNLIKE_FMR).similarity, calibration.threshold_at_fnmr(UNLIKE_FNMR))
        duplicate, near = at(DUPLICATE_PROBABILITY), at(NEAR_PROBABILITY)
        return cls(duplicate, near, max(at(MAX_NEIGHBORS), min(near, accept)), unlike)


@dataclass(frozen=True)
class HygieneFinding:
    """Problem of one or two subjects, by primary key.

    Attributes:
        templates: Templates in question; for duplicates and lookalikes the most similar pair.
        similarity: Mean over the compared templates, None without a similar subject.
        chance: False match rate at ``similarity`` for one comparison, an upper bound for a mean of several.
        own_similarity: Similarity of the templates to the nearest other template of their subject.
        belongs_to: Subject to which the templates should be moved.
    """

    kind: HygieneKind
    subjects: tuple[int, ...]
    templates: tuple[int, ...]
    similarity: float | None
    chance: float | None
    own_similarity: float | None
    belongs_to: int | None
    action: str


@dataclass(frozen=True, eq=False)
class TemplateGroup:
    """Rows of similar templates of one subject.

    ``own`` is the highest similarity to the subject's other templates, None without others. ``core`` marks the largest
    group, ``tied`` a group that shares the largest size.
    """

    subject: int
    rows: Ints
    own: float | None
    core: bool
    tied: bool


def find_problems(snapshot: Snapshot, calibration: Calibration, levels: HygieneThresholds) -> list[HygieneFinding]:
    """Return all findings, by kind as in ``KINDS``, then by confidence."""
    groups = [
        group
        for rows in _rows_by_subject(snapshot.subject_pks)
        for group in _group_templates(snapshot, rows, levels.unlike)
    ]
    if not groups:
        return []
    means = np.stack([snapshot.vectors[group.rows].mean(0) for group in groups])
    near = _neighbors(means, np.array([group.subject for group in groups]), levels.lookalike)
    groups = _resolve_ties(groups, near, levels.near)
    duplicates, lookalikes, twice = [], [], set()
    for a, b, similarity in _core_pairs(groups, near):
        rows = _most_similar_templates(snapshot, groups[a], groups[b])
        if similarity >= levels.duplicate:
            twice.add((groups[a].subject, groups[b].subject))
            duplicates.append(_pair_finding("duplicate_subjects", groups[a], groups[b], rows, similarity, calibration))
        else:
            lookalikes.append(_pair_finding("lookalikes", groups[a], groups[b], rows, similarity, calibration))
    astray = list(_mislabeled(snapshot, groups, near, twice, levels.near, calibration))
    found = [*duplicates, *astray, *_inconsistent(snapshot, groups), *lookalikes]
    return sorted(found, key=sort_key)


def sort_key(finding: HygieneFinding) -> tuple[int, int, int, int]:
    """Return the sort key of a finding.

    It uses the rounded similarity, so that the key is the same in every report that has the finding: the order of
    additions changes the last digits.
    """
    first, second = (*finding.templates, 0)[:2]
    return KINDS.index(finding.kind), -round(_confidence(finding) * 10**SIMILARITY_DIGITS), first, second


def _confidence(finding: HygieneFinding) -> float:
    if finding.similarity is None:
        return -1.0 - (finding.own_similarity or 0.0)
    return finding.similarity


def _rows_by_subject(subject_pks: Ints) -> list[Ints]:
    order = np.argsort(subject_pks, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(subject_pks[order])) + 1) if len(order) else []


def _group_templates(snapshot: Snapshot, rows: Ints, unlike: float) -> list[TemplateGroup]:
    subject = int(snapshot.subject_pks[rows[0]])
    similarities = snapshot.vectors[rows] @ snapshot.vectors[rows].T
    labels = _components(similarities >= unlike)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    largest = max(len(member) for member in members)
    tied = sum(len(member) == largest for member in members) > 1
    return [
        TemplateGroup(
            subject,
            rows[member],
            None if len(members) == 1 else float(np.delete(similarities[member], member, 1).max()),
            len(member) == largest and not tied,
            len(member) == largest and tied,
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


def _resolve_ties(
    groups: list[TemplateGroup], near: list[list[tuple[int, float]]], level: float
) -> list[TemplateGroup]:
    """Resolve subjects whose largest groups have the same size.

    Groups near another subject become strays. A single remaining group becomes the core; several stay tied.
    """
    tied: dict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        if group.tied:
            tied[group.subject].append(row)
    settled = list(groups)
    for rows in tied.values():
        elsewhere = {row for row in rows if any(similarity >= level for _, similarity in near[row])}
        left = [row for row in rows if row not in elsewhere]
        for row in elsewhere:
            settled[row] = replace(groups[row], tied=False)
        if len(left) == 1:
            settled[left[0]] = replace(groups[left[0]], tied=False, core=True)
    return settled


def _core_pairs(groups: list[TemplateGroup], near: list[list[tuple[int, float]]]) -> Iterator[tuple[int, int, float]]:
    pairs = {
        (min(a, b), max(a, b)): similarity
        for a, others in enumerate(near)
        for b, similarity in others
        if groups[a].core and groups[b].core
    }
    for (a, b), similarity in pairs.items():
        yield a, b, similarity


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
    "inconsistent_subject": "The photos show different people. Review them, and delete those of the wrong person.",
}


def _pair_finding(
    kind: Literal["duplicate_subjects", "lookalikes"],
    a: TemplateGroup,
    b: TemplateGroup,
    templates: tuple[int, int],
    similarity: float,
    calibration: Calibration,
) -> HygieneFinding:
    chance = calibration.fmr(similarity).value
    return HygieneFinding(kind, (a.subject, b.subject), templates, similarity, chance, None, None, ACTIONS[kind])


def _mislabeled(
    snapshot: Snapshot,
    groups: list[TemplateGroup],
    near: list[list[tuple[int, float]]],
    twice: set[tuple[int, int]],
    level: float,
    calibration: Calibration,
) -> Iterator[HygieneFinding]:
    for row, group in enumerate(groups):
        if group.core or group.tied:
            continue
        home = next(((groups[b].subject, s) for b, s in near[row] if s >= level and not groups[b].tied), None)
        if home is not None and ({(group.subject, home[0]), (home[0], group.subject)} & twice):
            continue  # the two subjects are one person, so no template needs to move
        templates = tuple(int(pk) for pk in snapshot.template_pks[group.rows])
        if home is None:
            yield HygieneFinding(
                "mislabeled_template", (group.subject,), templates, None, None, group.own, None, ACTIONS["delete"]
            )
        else:
            subject, similarity = home
            chance = calibration.fmr(similarity).value
            yield HygieneFinding(
                "mislabeled_template",
                (group.subject, subject),
                templates,
                similarity,
                chance,
                group.own,
                subject,
                ACTIONS["move"],
            )


def _inconsistent(snapshot: Snapshot, groups: list[TemplateGroup]) -> Iterator[HygieneFinding]:
    tied: dict[int, list[TemplateGroup]] = defaultdict(list)
    for group in groups:
        if group.tied:
            tied[group.subject].append(group)
    for subject, parts in tied.items():
        templates = tuple(int(snapshot.template_pks[part.rows[0]]) for part in parts)
        own = max(part.own for part in parts if part.own is not None)
        yield HygieneFinding(
            "inconsistent_subject", (subject,), templates, None, None, own, None, ACTIONS["inconsistent_subject"]
        )

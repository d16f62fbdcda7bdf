"""Who is enrolled twice, which templates are filed under the wrong subject, who looks like whom. Pure.

Templates of one subject that are alike, directly or by way of others, make a group; a subject's largest group is whom
it shows, the others are strays. Groups of different subjects are compared by the mean similarity of their templates,
which is the product of their mean vectors. So a stray does not make its subject a duplicate of the stray's own, and a
photo of somebody enrolled twice is no stray. A subject whose only template shows somebody else cannot be told from a
duplicate, and is reported as one.

Exact, block by block, ``BLOCK`` rows at once: 10,000 subjects of two templates take about a second of one core, 100,000
half a minute and a gigabyte (bench/hygiene.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from models.network import Float
from models.risk import Calibration
from service.gallery.subjects import Snapshot

HygieneKind = Literal["duplicate_subjects", "mislabelled_template", "inconsistent_subject", "lookalikes"]
KINDS: Final[tuple[HygieneKind, ...]] = (
    "duplicate_subjects",
    "mislabelled_template",
    "inconsistent_subject",
    "lookalikes",
)
"""In the order of the report."""
BLOCK: Final = 1024
NEAREST: Final = 5
"""Other groups that are looked at for each group."""
DUPLICATE_CHANCE: Final = 0.01
"""Accepted probability that any other subject of the gallery is as alike to a given one, where each has one photo: a
false pair for every two hundred subjects. With several photos it is rarer, for means vary less. Chosen in
bench/hygiene.py."""
NEAR_CHANCE: Final = 0.1
"""The same for a template that is known to be astray, which is likely to be at home somewhere, and for lookalikes."""
UNLIKE_FNMR: Final = 0.01
UNLIKE_FMR: Final = 0.001
DIGITS: Final = 4
"""Of similarities, that are shown."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Levels:
    """Similarities that mean something in a gallery. Groups at ``duplicate`` or above are taken for one person, strays
    at ``near`` or above for that subject's, groups from ``lookalike`` to ``duplicate`` for two people who may be
    confused; two templates of a subject below ``unlike`` for two people's, unless others stand between."""

    duplicate: float
    near: float
    lookalike: float
    unlike: float

    @classmethod
    def of(cls, calibration: Calibration, subjects: int, accept: float = 1.0) -> Levels:
        """``subjects``: in the gallery. ``accept``: the similarity from which a search names somebody: who reaches it
        is a lookalike, unless chance alone gives everybody several."""
        others = max(1, subjects - 1)

        def at(chance: float) -> float:
            return calibration.threshold_at_fmr(min(1.0, chance / others)).similarity

        unlike = min(calibration.threshold_at_fmr(UNLIKE_FMR).similarity, calibration.threshold_at_fnmr(UNLIKE_FNMR))
        duplicate, near = at(DUPLICATE_CHANCE), at(NEAR_CHANCE)
        return cls(duplicate, near, max(at(NEAREST), min(near, accept)), unlike)


@dataclass(frozen=True)
class Finding:
    """Subjects and templates by key.

    ``templates``: those in question; for duplicates and lookalikes the two most alike. ``similarity``: mean over the
    templates compared; ``chance``: that two different people are so alike, by the calibration for one comparison, which
    for a mean of several is an upper bound. Both None where nobody else is near. ``own_similarity``: of templates in
    question to the nearest other of their subject. ``belongs_to``: the subject a template should be moved to.
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
class Group:
    """Rows of one subject's templates that are alike. ``own``: similarity of the nearest template outside the group,
    None where there is none; ``core``: it is whom the subject shows; ``tied``: others of it are as large."""

    subject: int
    rows: Ints
    own: float | None
    core: bool
    tied: bool


def inspect(snapshot: Snapshot, calibration: Calibration, levels: Levels) -> list[Finding]:
    """Everything that deserves a look, most pressing first: by kind as in ``KINDS``, then the surest."""
    groups = [group for rows in _by_subject(snapshot.subject_pks) for group in _grouped(snapshot, rows, levels.unlike)]
    if not groups:
        return []
    means = np.stack([snapshot.vectors[group.rows].mean(0) for group in groups])
    near = _neighbours(means, np.array([group.subject for group in groups]), levels.lookalike)
    groups = _settle_ties(groups, near, levels.near)
    duplicates, lookalikes, twice = [], [], set()
    for a, b, similarity in _core_pairs(groups, near):
        rows = _most_alike(snapshot, groups[a], groups[b])
        if similarity >= levels.duplicate:
            twice.add((groups[a].subject, groups[b].subject))
            duplicates.append(_pair("duplicate_subjects", groups[a], groups[b], rows, similarity, calibration))
        else:
            lookalikes.append(_pair("lookalikes", groups[a], groups[b], rows, similarity, calibration))
    astray = list(_astray(snapshot, groups, near, twice, levels.near, calibration))
    found = [*duplicates, *astray, *_inconsistent(snapshot, groups), *lookalikes]
    return sorted(found, key=place)


def place(finding: Finding) -> tuple[int, int, int, int]:
    """What a report is in the order of. It is the same in the report of another moment that has the finding, too: the
    similarity counts as it is shown, for the order of additions moves its last digits."""
    first, second = (*finding.templates, 0)[:2]
    return KINDS.index(finding.kind), -round(_sureness(finding) * 10**DIGITS), first, second


def _sureness(finding: Finding) -> float:
    if finding.similarity is None:
        return -1.0 - (finding.own_similarity or 0.0)
    return finding.similarity


def _by_subject(subject_pks: Ints) -> list[Ints]:
    order = np.argsort(subject_pks, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(subject_pks[order])) + 1) if len(order) else []


def _grouped(snapshot: Snapshot, rows: Ints, unlike: float) -> list[Group]:
    subject = int(snapshot.subject_pks[rows[0]])
    similarities = snapshot.vectors[rows] @ snapshot.vectors[rows].T
    labels = _components(similarities >= unlike)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    largest = max(len(member) for member in members)
    tied = sum(len(member) == largest for member in members) > 1
    return [
        Group(
            subject,
            rows[member],
            None if len(members) == 1 else float(np.delete(similarities[member], member, 1).max()),
            len(member) == largest and not tied,
            len(member) == largest and tied,
        )
        for member in members
    ]


def _components(linked: NDArray[np.bool_]) -> NDArray[np.intp]:
    """(n,) the smallest row that each row of a symmetric (n, n) matrix is linked to, directly or by way of others."""
    labels = np.arange(len(linked))
    linked = linked | np.eye(len(linked), dtype=bool)
    while True:
        spread = np.where(linked, labels[None], len(linked)).min(1)
        if (spread == labels).all():
            return labels
        labels = spread


def _neighbours(means: Float, subjects: Ints, level: float) -> list[list[tuple[int, float]]]:
    """For each group its nearest few of other subjects at ``level`` or above, nearest first."""
    firsts, seconds, values = [], [], []
    for start in range(0, len(means), BLOCK):
        block = means[start : start + BLOCK] @ means[start:].T
        rows, columns = np.divmod(np.flatnonzero(block >= level), block.shape[1])
        # Once a pair; a subject's own groups are no neighbours.
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
        [(int(pairs[1, i]), float(similarity[i])) for i in order[first : min(last, first + NEAREST)]]
        for first, last in pairwise(ends.tolist())
    ]


def _settle_ties(groups: list[Group], near: list[list[tuple[int, float]]], level: float) -> list[Group]:
    """Where a subject's largest groups are of one size, those near somebody else are strays, and one that is left alone
    is whom the subject shows; where several are left, they stay tied."""
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


def _core_pairs(groups: list[Group], near: list[list[tuple[int, float]]]) -> Iterator[tuple[int, int, float]]:
    pairs = {
        (min(a, b), max(a, b)): similarity
        for a, others in enumerate(near)
        for b, similarity in others
        if groups[a].core and groups[b].core
    }
    for (a, b), similarity in pairs.items():
        yield a, b, similarity


def _most_alike(snapshot: Snapshot, a: Group, b: Group) -> tuple[int, int]:
    between = snapshot.vectors[a.rows] @ snapshot.vectors[b.rows].T
    i, j = np.unravel_index(int(between.argmax()), between.shape)
    return int(snapshot.template_pks[a.rows[i]]), int(snapshot.template_pks[b.rows[j]])


ACTIONS: Final = {
    "duplicate_subjects": "Compare the two photos; if they show one person, merge one subject into the other. "
    "If one subject has a single photo, that photo may be filed wrongly instead.",
    "lookalikes": "Two people who may be taken for each other: compare the photos; ask a stricter risk where it "
    "matters, or enrol better photos of both.",
    "move": "Compare the photo with those of the other subject; if it shows that one, move it there.",
    "delete": "Compare the photo with the subject's others; if it shows somebody else, delete it; if it is merely "
    "poor, enrol a better one.",
    "inconsistent_subject": "The photos do not agree on who this is, and nothing says which are right: look at them, "
    "and delete those of another person.",
}


def _pair(
    kind: Literal["duplicate_subjects", "lookalikes"],
    a: Group,
    b: Group,
    templates: tuple[int, int],
    similarity: float,
    calibration: Calibration,
) -> Finding:
    chance = calibration.fmr(similarity).value
    return Finding(kind, (a.subject, b.subject), templates, similarity, chance, None, None, ACTIONS[kind])


def _astray(
    snapshot: Snapshot,
    groups: list[Group],
    near: list[list[tuple[int, float]]],
    twice: set[tuple[int, int]],
    level: float,
    calibration: Calibration,
) -> Iterator[Finding]:
    for row, group in enumerate(groups):
        if group.core or group.tied:
            continue
        home = next(((groups[b].subject, s) for b, s in near[row] if s >= level and not groups[b].tied), None)
        if home is not None and ({(group.subject, home[0]), (home[0], group.subject)} & twice):
            continue  # the two are one person: nothing to move
        templates = tuple(int(pk) for pk in snapshot.template_pks[group.rows])
        if home is None:
            yield Finding(
                "mislabelled_template", (group.subject,), templates, None, None, group.own, None, ACTIONS["delete"]
            )
        else:
            subject, similarity = home
            chance = calibration.fmr(similarity).value
            yield Finding(
                "mislabelled_template",
                (group.subject, subject),
                templates,
                similarity,
                chance,
                group.own,
                subject,
                ACTIONS["move"],
            )


def _inconsistent(snapshot: Snapshot, groups: list[Group]) -> Iterator[Finding]:
    tied: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        if group.tied:
            tied[group.subject].append(group)
    for subject, parts in tied.items():
        templates = tuple(int(snapshot.template_pks[part.rows[0]]) for part in parts)
        own = max(part.own for part in parts if part.own is not None)
        yield Finding(
            "inconsistent_subject", (subject,), templates, None, None, own, None, ACTIONS["inconsistent_subject"]
        )

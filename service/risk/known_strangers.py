"""Known strangers: faces that resemble a decoy of a subject more than the subject. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from service.risk.decision import KNOWN_STRANGER, Decision, decide
from service.risk.one_face import at_own_threshold, rivaled
from service.risk.search import Identification

RANKS: Final = ("unknown", "uncertain", "identified")
"""Outcomes of a search, from the least to the most."""


def without_known_stranger(found: Identification, decoys: Mapping[int, float]) -> Identification:
    """Return the answer for a face that may be a decoy of the subjects found.

    A decoy rules its subject out if the face is more similar to the decoy than to the subject. If the best subject is
    ruled out, the answer is decided again among the other subjects, at the thresholds of the first decision. The
    runner-up still adjusts the scores, as in `service.risk.one_face`, so no score and no probability gets better. The
    outcome is the lower one of both decisions: `uncertain` never becomes `identified`, and `unknown` never changes.
    An answer that is `unknown` by this rule keeps the numbers of the subject that was ruled out.

    So every face that is identified was identified without decoys too, and the risk of a stranger does not rise.

    Args:
        found: the answer without decoys.
        decoys: highest similarity of the face to a decoy, by subject.
    """
    first, thresholds = found.decision, found.thresholds
    ruled_out = {one.subject_pk for one in found.ranked if decoys.get(one.subject_pk, -1.0) > one.similarity}
    if first.best is None or first.outcome == "unknown" or not ruled_out:
        return found
    if first.best.subject_pk not in ruled_out:
        return replace(found, ranked=[one for one in found.ranked if one.subject_pk not in ruled_out])
    rest = [one for one in at_own_threshold(found) if one.subject_pk not in ruled_out]
    second = decide([*rest[:1], *(rivaled(one, rest[0], thresholds) for one in rest[1:])], thresholds)
    if second.best is None or second.outcome == "unknown":
        decision, shown = replace(first, outcome="unknown"), found.candidates
    else:
        outcome = min(first.outcome, second.outcome, key=RANKS.index)
        decision = Decision(outcome, second.best, second.runner_up)
        shown = [second.best if one.subject_pk == second.best.subject_pk else one for one in found.candidates]
    return replace(
        found,
        decision=decision,
        candidates=shown,
        ranked=rest,
        reference=first.runner_up,
        reasons=(*found.reasons, KNOWN_STRANGER),
    )

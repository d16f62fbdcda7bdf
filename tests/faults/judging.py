"""Evaluation of the writers' histories: operations by template, and inconsistencies."""

from __future__ import annotations

from collections.abc import Iterable

from tests.faults.history import NEVER, Operation, has_an_order
from tests.faults.workers import Answered, Asked


def operations_of(histories: Iterable[list[Asked | Answered]]) -> dict[str, list[Operation]]:
    """Group the operations by template. Unanswered writes may have happened; rejected operations and unanswered
    searches are ignored.
    """
    by_template: dict[str, list[Operation]] = {}
    subjects_deleted: list[Operation] = []
    for history in histories:
        answers = {line.number: line for line in history if isinstance(line, Answered)}
        for asked in (line for line in history if isinstance(line, Asked)):
            answer = answers.get(asked.number, Answered(asked.number, NEVER, {}))
            if answer.found is None or (asked.kind == "read" and answer.ended == NEVER):
                continue
            if asked.kind == "delete subject":
                subjects_deleted.append(Operation(asked.kind, asked.began, answer.ended, asked.subject))
            for template in asked.templates:
                if asked.kind == "read" and template not in answer.found:
                    continue
                subject = answer.found[template] if asked.kind == "read" else asked.subject
                operation = Operation(asked.kind, asked.began, answer.ended, subject, asked.to)
                by_template.setdefault(template, []).append(operation)
    for operations in by_template.values():
        homes = {o.subject for o in operations} | {o.to for o in operations}
        operations += [deletion for deletion in subjects_deleted if deletion.subject in homes]
    return by_template


def without_an_order(by_template: dict[str, list[Operation]]) -> dict[str, list[Operation]]:
    """Return the templates whose history is not linearizable."""
    return {template: found for template, found in by_template.items() if not has_an_order(found)}


def halves(histories: list[list[Asked | Answered]], present: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the unanswered enrollments that are stored partially, although no request deleted the rest."""
    there = set(present)
    asked = [line for history in histories for line in history if isinstance(line, Asked)]
    deleted = {template for line in asked if line.kind == "delete" for template in line.templates}
    emptied = {line.subject for line in asked if line.kind == "delete subject"}
    moved_to = {template: line.to for line in asked if line.kind == "move" for template in line.templates}
    broken = []
    for history in histories:
        answered = {line.number for line in history if isinstance(line, Answered) and line.ended != NEVER}
        for line in history:
            if not isinstance(line, Asked) or line.kind != "enroll" or line.number in answered:
                continue
            homes = {line.subject} | {moved_to.get(template) for template in line.templates}
            if homes & emptied or deleted & set(line.templates):
                continue
            if sum(template in there for template in line.templates) not in (0, len(line.templates)):
                broken.append(line.templates)
    return broken

"""What to do about a refusal, at a terminal: where the service's remedy speaks to those who write requests. Pure."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from service.errors import InvalidRequestError

REMEDIES: Final = {
    "invalid_request": "'--help' after the command says what it takes; docs/cli.md.",
    "gallery_not_found": "'kith gallery list' names those that there are, `kith gallery create {gallery}` makes one.",
    "subject_not_found": "`kith subject list --gallery {gallery}` names those that there are.",
    "template_not_found": "`kith template list {subject}`, with its --gallery, names those that there are.",
    "job_not_found": "'kith jobs list' names those that there are; finished ones are forgotten after two weeks.",
    "model_not_served": "'kith models list' names packs; KITH_ALSO has the server serve more than one.",
    "unauthorized": "Name a key: --api-key, or KITH_CLIENT_KEY; 'kith keys create' on the server's machine makes one.",
    "risk_uncalibrated": "Name a similarity, as --threshold 0.4; calibrate the pack with kith-train calibrate; or "
    "enrol 50 people or more.",
    "several_faces": "Crop the photo to one person, or take the largest with --largest-face.",
    "duplicate_subject": "Enrol it there, or insist with --allow-duplicate.",
    "inconsistent_template": "Check the photo, or insist with --allow-inconsistent.",
    "low_quality": "Take a sharper, better lit, more frontal photo, or insist with --allow-low-quality.",
    "migration_state": "`kith gallery migrate {gallery}` says where it is; --finish or --roll-back before another one "
    "begins.",
    "migration_incomplete": "Wait for the job, enrol what has no crop anew, or insist with --force: what is left out "
    "is found by no search.",
    "unreadable": "See that the file is there and may be read, then run the same again.",
}
NAMED: Final = {
    "gallery": re.compile(r"gallery ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"),
    "subject": re.compile(r"subject ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"),
}
"""In a problem's detail, as Python writes text."""
WHERE: Final = re.compile(r"(^|; )(?:body|path|query)\.")


def remedy_of(problem: Mapping[str, Any]) -> str:
    """Of a problem document; a remedy for its own occasion stays."""
    code, told = problem.get("code"), str(problem.get("remedy") or "")
    if code == InvalidRequestError.code and told not in ("", InvalidRequestError.remedy):
        return told
    known = REMEDIES.get(str(code))
    if known is None:
        return told
    detail = str(problem.get("detail", ""))
    return known.format(**{what: shlex.quote(named_in(detail, what) or what.upper()) for what in NAMED})


def named_in(detail: str, what: str) -> str | None:
    """The gallery or the subject that a problem's detail speaks of."""
    found = NAMED[what].search(detail)
    return None if found is None else str(ast.literal_eval(found[1]))


def detail_of(problem: Mapping[str, Any]) -> str:
    """Fields by their names alone: whether they go in the path or the body is the client's matter."""
    detail = str(problem.get("detail", ""))
    return WHERE.sub(r"\1", detail) if problem.get("code") == InvalidRequestError.code else detail


def remedies_of(problems: Iterable[Mapping[str, Any]]) -> list[str]:
    """What to do about each code, once, below what lists the refusals."""
    first: dict[str, Mapping[str, Any]] = {}
    for problem in problems:
        first.setdefault(str(problem["code"]), problem)
    lines = ((code, remedy_of(problem)) for code, problem in first.items())
    return [f"{code}: {remedy}" for code, remedy in lines if remedy]

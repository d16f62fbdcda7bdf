"""Remedies of error codes in terms of the command line. The service's own remedies are written for API clients."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from service.core.errors import InvalidRequestError

REMEDIES: Final = {
    "invalid_request": "Run the command with '--help', or see docs/cli.md.",
    "gallery_not_found": "List galleries with 'kith gallery list', or create one: `kith gallery create {gallery}`.",
    "subject_not_found": "List subjects: `kith subject list --gallery {gallery}`.",
    "template_not_found": "List templates: `kith template list {subject}`, with the option --gallery.",
    "job_not_found": "List jobs with 'kith jobs list'. Finished jobs are deleted after two weeks.",
    "model_not_served": "List packs with 'kith models list'. Set KITH_EXTRA_PACKS on the server to serve several.",
    "unauthorized": "Set --api-key, KITH_CLIENT_KEY or KITH_API_KEY. 'kith keys create' on the server's "
    "machine creates a key.",
    "risk_uncalibrated": "Use a similarity, such as --threshold 0.4; or calibrate the pack: "
    "'kith models calibrate PACK --photos FOLDER'; "
    "or enroll at least 50 people.",
    "several_faces": "Crop the photo to one person, or use --largest-face.",
    "duplicate_subject": "Enroll the photo as that subject, or use --allow-duplicate.",
    "inconsistent_template": "Check the photo, or use --allow-inconsistent.",
    "low_quality": "Use a sharper, better lit, more frontal photo, or use --allow-low-quality.",
    "migration_state": "See the state with `kith gallery migrate {gallery}`. Use --finish or --roll-back before you "
    "start another migration.",
    "migration_incomplete": "Wait for the job, enroll subjects without a crop again, or use --force. Searches do not "
    "find templates that were not migrated.",
    "unreadable": "Check that the file exists and is readable, then run the command again.",
}
# Names in a problem's detail, quoted by Python's repr.
QUOTED_NAMES: Final = {
    kind: re.compile(kind + r" ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")") for kind in ("gallery", "subject")
}
FIELD_PREFIX: Final = re.compile(r"(^|; )(?:body|path|query)\.")


def remedy_for(problem: Mapping[str, Any]) -> str:
    """Return what the user should do about a problem document. A remedy specific to the request is kept."""
    code, remedy = problem.get("code"), str(problem.get("remedy") or "")
    if code == InvalidRequestError.code and remedy not in ("", InvalidRequestError.remedy):
        return remedy
    template = REMEDIES.get(str(code))
    if template is None:
        return remedy
    detail = str(problem.get("detail", ""))
    return template.format(**{kind: shlex.quote(_quoted_name(detail, kind) or kind.upper()) for kind in QUOTED_NAMES})


def detail_for(problem: Mapping[str, Any]) -> str:
    """Return a problem's detail, without the part of the request that each invalid field belongs to."""
    detail = str(problem.get("detail", ""))
    return FIELD_PREFIX.sub(r"\1", detail) if problem.get("code") == InvalidRequestError.code else detail


def remedy_lines(problems: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line per error code that has a remedy: 'code: remedy'."""
    first: dict[str, Mapping[str, Any]] = {}
    for problem in problems:
        first.setdefault(str(problem["code"]), problem)
    remedies = ((code, remedy_for(problem)) for code, problem in first.items())
    return [f"{code}: {remedy}" for code, remedy in remedies if remedy]


def _quoted_name(detail: str, kind: str) -> str | None:
    found = QUOTED_NAMES[kind].search(detail)
    return None if found is None else str(ast.literal_eval(found[1]))

"""Builder of the compatible API, and its error bodies: a message and a numeric code, beside the problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI

from kith.wire.fields import Problem
from service.api.compreface import faces, recognition, subjects
from service.api.compreface.access import PREFIX
from service.settings import Settings

# Codes of com.exadel.frs.commonservice.handler.CommonExceptionCode.
UNDEFINED: Final = 0
CODES: Final[Mapping[str, tuple[int, int]]] = {
    "invalid_request": (400, 26),
    "image_empty": (400, 21),
    "image_format": (400, 21),
    "image_damaged": (400, 21),
    "no_face": (400, 28),
    "several_faces": (400, 31),
    "subject_not_found": (404, 42),
    "subject_exists": (400, 43),
    "template_not_found": (404, 44),
    "crop_not_found": (404, 11),
    "gallery_not_found": (404, 10),
    "unauthorized": (401, 10),
    "forbidden": (403, 1),
}
"""Status and CompreFace's code by the code of Kith's problem. All others keep their status, with UNDEFINED."""


def mount_compreface(app: FastAPI, settings: Settings) -> None:
    """Add the routes if KITH_COMPAT is compreface."""
    if settings.compat != "compreface":
        return
    for module in (subjects, faces, recognition):
        app.router.routes.extend(module.routes.routes)
    app.state.problem_formats[f"{PREFIX}/"] = _to_compreface


def _to_compreface(problem: Problem) -> tuple[int, dict[str, Any]]:
    """Return the status and body of an error response."""
    status, code = CODES.get(problem.code, (problem.status, UNDEFINED))
    document = problem.model_dump(mode="json", exclude_none=True)
    return status, {"message": f"{problem.detail}. {problem.remedy}", "code": code, "kith": document}

"""Builder of the compatible API."""

from __future__ import annotations

from fastapi import FastAPI

from service.api.compreface import faces, recognition, subjects, verification
from service.api.compreface.access import PREFIX
from service.api.compreface.problems import to_compreface
from service.api.compreface.similarity import parse_cutoffs
from service.api.http.routing import check_routes
from service.core.errors import SettingsError
from service.settings import Settings


def mount_compreface(app: FastAPI, settings: Settings) -> None:
    """Add the routes if KITH_COMPAT is compreface. Raises SettingsError: the cut-offs are invalid."""
    if settings.compat != "compreface":
        return
    try:
        app.state.compreface_cutoffs = parse_cutoffs(settings.compat_cutoffs)
    except ValueError as error:
        raise SettingsError(f"KITH_COMPAT_CUTOFFS: {error}") from error
    for module in (subjects, faces, recognition, verification):
        app.include_router(check_routes(module.router))
    app.state.problem_formats[f"{PREFIX}/"] = to_compreface

"""Shell completion of names, from the server at ``--url`` or KITH_URL.

Completion must not disturb the prompt: on any error it proposes nothing and prints nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import typer

from service.core.text import replace_controls

TIMEOUT_S: Final = 1.0
MAX_PROPOSALS: Final = 200
Proposals = list[tuple[str, str]]
"""Values, each with the description that the shell shows beside it."""


def complete_galleries(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose gallery names."""
    return _listed(ctx, incomplete, "/v1/galleries", "name", lambda each: f"{each['subjects']} people")


def complete_jobs(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose job ids."""
    return _listed(ctx, incomplete, "/v1/jobs", "id", lambda each: f"{each['kind']}, {each['state']}")


def complete_subjects(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose subject ids of the gallery that precedes them on the line."""
    gallery = ctx.params.get("gallery")
    if not isinstance(gallery, str):
        return []
    path = f"/v1/galleries/{quote(gallery, safe='')}/subjects"
    return _listed(ctx, incomplete, path, "id", lambda each: each["name"] or "")


def complete_templates(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose template ids of the gallery and the subject that precede them on the line."""
    gallery, subject = ctx.params.get("gallery"), ctx.params.get("subject")
    if not (isinstance(gallery, str) and isinstance(subject, str)):
        return []
    path = f"/v1/galleries/{quote(gallery, safe='')}/subjects/{quote(subject, safe='')}/templates"
    return _listed(ctx, incomplete, path, "id", lambda each: each["kind"])


def complete_events(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose names of audit events."""
    return sorted(set(_listed(ctx, incomplete, "/v1/audit", "event", lambda _: "")))


def complete_keys(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose ids of API keys."""
    return _listed(ctx, incomplete, "/v1/keys", "id", lambda each: each["name"])


def complete_served(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose packs that the server serves, or all packs if no server is named."""
    found = _listed(ctx, incomplete, "/v1/models", "model", lambda _: "", "models")
    return found or complete_packs(ctx, incomplete)


def complete_packs(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose packs of the catalog."""
    with contextlib.suppress(Exception):
        from models.pack.catalog import CATALOG_PATH, read_catalog

        entries = read_catalog(Path(os.environ.get("KITH_CATALOG", CATALOG_PATH)))
        return _matching([(entry.name, entry.about) for entry in entries.values()], incomplete)
    return []


def _matching(found: Proposals, incomplete: str) -> Proposals:
    return [(name, replace_controls(description)) for name, description in found if name.startswith(incomplete)]


def _listed(
    ctx: typer.Context,
    incomplete: str,
    path: str,
    name: str,
    describe: Callable[[dict[str, Any]], str],
    items: str = "data",
) -> Proposals:
    """Return proposals of a list that the server answers with; none if the line names no server."""
    url = ctx.params.get("url") or os.environ.get("KITH_URL")
    if not url:
        return []
    key = ctx.params.get("api_key") or os.environ.get("KITH_CLIENT_KEY")
    with contextlib.suppress(Exception):
        import json
        from http.client import HTTPConnection, HTTPSConnection

        parts = urlsplit(url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with contextlib.closing(kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)) as connection:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            query = f"?limit={MAX_PROPOSALS}" if items == "data" else ""
            connection.request("GET", f"{parts.path.rstrip('/')}{path}{query}", headers=headers)
            answer = json.loads(connection.getresponse().read())
        return _matching([(each[name], describe(each)) for each in answer[items]], incomplete)
    return []

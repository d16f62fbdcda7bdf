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


def _complete(
    path: str,
    name: str,
    describe: Callable[[dict[str, Any]], str] = lambda _: "",
    items: str = "data",
    searched: bool = False,
) -> Callable[[typer.Context, str], Proposals]:
    """Return a function that proposes the ``name`` of each item that the server lists at ``path``.

    It proposes nothing if the line does not name the server, or the gallery or subject in ``path``. ``searched``: the
    server finds the items by what was typed.
    """

    def complete(ctx: typer.Context, incomplete: str) -> Proposals:
        url = ctx.params.get("url") or os.environ.get("KITH_URL")
        if not url:
            return []
        key = ctx.params.get("api_key") or os.environ.get("KITH_CLIENT_KEY") or os.environ.get("KITH_API_KEY")
        with contextlib.suppress(Exception):
            import json
            from http.client import HTTPConnection, HTTPSConnection

            named = {each: quote(value, safe="") for each, value in ctx.params.items() if isinstance(value, str)}
            parts = urlsplit(url)
            kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
            with contextlib.closing(kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)) as connection:
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                query = f"?limit={MAX_PROPOSALS}" if items == "data" else ""
                if searched and incomplete:
                    query += f"&q={quote(incomplete, safe='')}"
                address = f"{parts.path.rstrip('/')}{path.format(**named)}{query}"
                connection.request("GET", address, headers=headers)
                answer = json.loads(connection.getresponse().read())
            return _matching([(each[name], describe(each)) for each in answer[items]], incomplete)
        return []

    return complete


complete_galleries = _complete("/v1/galleries", "name", lambda each: f"{each['subject_count']} people")
complete_jobs = _complete("/v1/jobs", "id", lambda each: f"{each['kind']}, {each['state']}")
complete_subjects = _complete("/v1/galleries/{gallery}/subjects", "id", lambda each: each["name"] or "", searched=True)
complete_templates = _complete("/v1/galleries/{gallery}/subjects/{subject}/templates", "id", lambda each: each["kind"])
complete_decoys = _complete("/v1/galleries/{gallery}/subjects/{subject}/decoys", "id", lambda each: each["kind"])
complete_keys = _complete("/v1/keys", "id", lambda each: each["name"])
_complete_lines = _complete("/v1/audit", "event")
_complete_models = _complete("/v1/models", "model", items="models")


def complete_events(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose names of audit events."""
    return sorted(set(_complete_lines(ctx, incomplete)))


def complete_served(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose packs that the server serves, or all packs if no server is named."""
    return _complete_models(ctx, incomplete) or complete_packs(ctx, incomplete)


def complete_packs(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose packs of the catalog."""
    with contextlib.suppress(Exception):
        from models.pack.catalog import CATALOG_PATH, read_catalog

        entries = read_catalog(Path(os.environ.get("KITH_CATALOG", CATALOG_PATH)))
        return _matching([(entry.name, entry.about) for entry in entries.values()], incomplete)
    return []


def _matching(found: Proposals, incomplete: str) -> Proposals:
    return [(name, replace_controls(description)) for name, description in found if name.startswith(incomplete)]

"""Shell completion of names, from the server at ``--url`` or KITH_URL, or from the local database.

Completion must not disturb the prompt: on any error it proposes nothing and prints nothing.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

import typer

from service.core.text import replace_controls

if TYPE_CHECKING:
    from service.domain.gallery import Gallery
    from service.storage.repositories.store import Store

TIMEOUT_S: Final = 1.0
MAX_PROPOSALS: Final = 200
Proposals = list[tuple[str, str]]
"""Values, each with the description that the shell shows beside it."""


def complete_galleries(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose gallery names."""
    found = _from_server(ctx, "/v1/galleries", "galleries", "name", lambda each: f"{each['subjects']} people")
    if found is None:
        found = _from_file("SELECT name, '' FROM galleries ORDER BY name LIMIT ?")
    return _matching(found, incomplete)


def complete_jobs(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose job ids."""
    found = _from_server(ctx, "/v1/jobs", "jobs", "id", lambda each: f"{each['kind']}, {each['state']}")
    if found is None:
        found = _from_file("SELECT id, kind || ', ' || state FROM jobs ORDER BY created_at DESC LIMIT ?")
    return _matching(found, incomplete)


def complete_subjects(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose subject ids of the gallery that precedes them on the line."""
    gallery = ctx.params.get("gallery")
    if not isinstance(gallery, str):
        return []
    path = f"/v1/galleries/{quote(gallery, safe='')}/subjects"
    found = _from_server(ctx, path, "subjects", "id", lambda each: each["name"] or "")
    if found is None:
        found = _from_database(gallery, _list_subjects)
    return _matching(found, incomplete)


def complete_templates(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose template ids of the gallery and the subject that precede them on the line."""
    gallery, subject = ctx.params.get("gallery"), ctx.params.get("subject")
    if not (isinstance(gallery, str) and isinstance(subject, str)):
        return []
    path = f"/v1/galleries/{quote(gallery, safe='')}/subjects/{quote(subject, safe='')}/templates"
    found = _from_server(ctx, path, "templates", "id", lambda each: each["kind"])
    if found is None:
        found = _from_database(
            gallery, lambda store, opened: [(each.id, each.kind) for each in store.templates.list_page(opened, subject)]
        )
    return _matching(found, incomplete)


def complete_events(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose names of audit events."""
    found = _from_server(ctx, "/v1/audit", "lines", "event", lambda _: "")
    if found is None:
        found = _from_file("SELECT DISTINCT event, '' FROM audit ORDER BY event LIMIT ?")
    return _matching(sorted(set(found)), incomplete)


def complete_keys(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose ids of API keys."""
    found = _from_server(ctx, "/v1/keys", "keys", "id", lambda each: each["name"])
    if found is None:
        found = _from_file("SELECT id, '' FROM api_keys WHERE revoked_at IS NULL ORDER BY created_at LIMIT ?")
    return _matching(found, incomplete)


def complete_served(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose packs that the server serves, or all packs if no server is named."""
    found = _from_server(ctx, "/v1/models", "models", "model", lambda _: "")
    return complete_packs(ctx, incomplete) if found is None else _matching(found, incomplete)


def complete_packs(ctx: typer.Context, incomplete: str) -> Proposals:
    """Propose packs of the catalog."""
    with contextlib.suppress(Exception):
        from models.pack.catalog import CATALOG_PATH, read_catalog

        entries = read_catalog(Path(os.environ.get("KITH_CATALOG", CATALOG_PATH)))
        return _matching([(entry.name, entry.about) for entry in entries.values()], incomplete)
    return []


def _matching(found: Proposals, incomplete: str) -> Proposals:
    return [(name, replace_controls(description)) for name, description in found if name.startswith(incomplete)]


def _from_server(
    ctx: typer.Context, path: str, items: str, name: str, describe: Callable[[dict[str, Any]], str]
) -> Proposals | None:
    """Return proposals of a list that the server answers with, or None if the line names no server."""
    url = ctx.params.get("url") or os.environ.get("KITH_URL")
    if not url:
        return None
    key = ctx.params.get("api_key") or os.environ.get("KITH_CLIENT_KEY")
    with contextlib.suppress(Exception):
        import json
        from http.client import HTTPConnection, HTTPSConnection

        parts = urlsplit(url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with contextlib.closing(kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)) as connection:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            connection.request("GET", f"{parts.path.rstrip('/')}{path}?limit={MAX_PROPOSALS}", headers=headers)
            answer = json.loads(connection.getresponse().read())
        return [(each[name], describe(each)) for each in answer[items]]
    return []


def _from_file(query: str) -> Proposals:
    """Read SQLite's file directly. Opening it as the service does could create or migrate it."""
    with contextlib.suppress(Exception):
        path = _database_file()
        if path is None:
            return []
        address = f"file:{quote(str(path))}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=TIMEOUT_S)) as file:
            return [(str(name), str(description)) for name, description in file.execute(query, (MAX_PROPOSALS,))]
    return []


def _list_subjects(store: Store, gallery: Gallery) -> Proposals:
    from service.domain.gallery import SubjectFilter

    subjects = store.subjects.list_page(gallery, None, MAX_PROPOSALS, SubjectFilter())
    return [(each.id, each.name or "") for each in subjects]


def _from_database(gallery: str, list_proposals: Callable[[Store, Gallery], Proposals]) -> Proposals:
    """Open the database with its master key, because subjects are stored encrypted."""
    with contextlib.suppress(Exception):
        if _database_file() is None:
            return []
        from service.builders import open_own_database
        from service.settings import load_settings
        from service.storage.repositories.store import Store

        with contextlib.closing(open_own_database(load_settings())) as database:
            store = Store(database)
            return list_proposals(store, store.galleries.get(gallery))
    return []


def _database_file() -> Path | None:
    """Return the file of the local SQLite database, or None if it is missing or another database is used."""
    from pydantic_settings import BaseSettings, SettingsConfigDict

    class DatabaseSettings(BaseSettings):
        """Location of the database. Full settings need packages that are slow to import."""

        model_config = SettingsConfigDict(env_prefix="KITH_", env_file=".env", extra="ignore")
        data_dir: Path = Path("data")
        database_url: str | None = None

    settings = DatabaseSettings()
    if settings.database_url is None:
        path = settings.data_dir / "kith.db"
    elif settings.database_url.startswith("sqlite:///"):
        path = Path(settings.database_url.removeprefix("sqlite:///"))
    else:
        return None
    return path.resolve() if path.is_file() else None

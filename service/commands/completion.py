"""What a shell proposes at TAB: names of what there is, from the server of ``--url`` or KITH_URL,
or from the local database. Whatever is in the way, it proposes nothing, and says nothing."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

import typer

from service.words import shown

if TYPE_CHECKING:
    from http.client import HTTPConnection

    from service.gallery.store import Store
    from service.gallery.subjects import Gallery, Subject

PATIENCE_S: Final = 1.0
MOST: Final = 200
Proposals = list[tuple[str, str]]
"""Each with what a shell shows beside it."""


def complete_galleries(ctx: typer.Context, incomplete: str) -> Proposals:
    found = _from_server(ctx, "/v1/galleries", "galleries", "name", lambda each: f"{each['subjects']} people")
    if found is None:
        found = _from_file(ctx, "SELECT name, '' FROM galleries ORDER BY name LIMIT ?")
    return _fitting(found, incomplete)


def complete_jobs(ctx: typer.Context, incomplete: str) -> Proposals:
    found = _from_server(ctx, "/v1/jobs", "jobs", "id", lambda each: f"{each['kind']}, {each['state']}")
    if found is None:
        found = _from_file(ctx, "SELECT id, kind || ', ' || state FROM jobs ORDER BY created_at DESC LIMIT ?")
    return _fitting(found, incomplete)


def complete_subjects(ctx: typer.Context, incomplete: str) -> Proposals:
    """Of the gallery that the line names before."""
    gallery = ctx.params.get("gallery")
    if not isinstance(gallery, str):
        return []
    path = f"/v1/galleries/{quote(gallery, safe='')}/subjects"
    found = _from_server(ctx, path, "subjects", "id", lambda each: each["name"] or "")
    if found is None:
        found = _unsealed(gallery, lambda store, of: [(each.id, each.name or "") for each in _people(store, of)])
    return _fitting(found, incomplete)


def complete_events(ctx: typer.Context, incomplete: str) -> Proposals:
    """Of the audit's last lines."""
    found = _from_server(ctx, "/v1/audit", "lines", "event", lambda _: "")
    if found is None:
        found = _from_file(ctx, "SELECT DISTINCT event, '' FROM audit ORDER BY event LIMIT ?")
    return _fitting(sorted(set(found)), incomplete)


def complete_templates(ctx: typer.Context, incomplete: str) -> Proposals:
    """Of the gallery and the subject that the line names before."""
    gallery, subject = ctx.params.get("gallery"), ctx.params.get("subject")
    if not (isinstance(gallery, str) and isinstance(subject, str)):
        return []
    path = f"/v1/galleries/{quote(gallery, safe='')}/subjects/{quote(subject, safe='')}/templates"
    found = _from_server(ctx, path, "templates", "id", lambda each: each["kind"])
    if found is None:
        found = _unsealed(
            gallery, lambda store, of: [(each.id, each.kind) for each in store.list_templates(of, subject)]
        )
    return _fitting(found, incomplete)


def complete_keys(ctx: typer.Context, incomplete: str) -> Proposals:
    found = _from_server(ctx, "/v1/keys", "keys", "id", lambda each: each["name"])
    if found is None:
        found = _from_file(ctx, "SELECT id, '' FROM api_keys WHERE revoked_at IS NULL ORDER BY created_at LIMIT ?")
    return _fitting(found, incomplete)


def complete_served(ctx: typer.Context, incomplete: str) -> Proposals:
    """Packs that are served; where no server is named, those that there are."""
    found = _from_server(ctx, "/v1/models", "models", "model", lambda _: "")
    return complete_packs(ctx, incomplete) if found is None else _fitting(found, incomplete)


def complete_packs(ctx: typer.Context, incomplete: str) -> Proposals:
    from models.catalog import CATALOG, read_catalog

    with contextlib.suppress(Exception):
        entries = read_catalog(Path(os.environ.get("KITH_CATALOG", CATALOG)))
        return _fitting([(entry.name, entry.about) for entry in entries.values()], incomplete)
    return []


def _fitting(found: Proposals, incomplete: str) -> Proposals:
    return [(name, shown(what)) for name, what in found if name.startswith(incomplete)]


def _from_server(
    ctx: typer.Context, path: str, listed: str, name: str, what: Callable[[dict[str, Any]], str]
) -> Proposals | None:
    """None: the line means no server."""
    url = ctx.params.get("url") or os.environ.get("KITH_URL")
    if not url:
        return None
    key = ctx.params.get("api_key") or os.environ.get("KITH_CLIENT_KEY")
    with contextlib.suppress(Exception):
        import json

        with _opened(url) as connection:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            connection.request("GET", f"{urlsplit(url).path.rstrip('/')}{path}?limit={MOST}", headers=headers)
            answer = json.loads(connection.getresponse().read())
        return [(each[name], what(each)) for each in answer[listed]]
    return []


@contextlib.contextmanager
def _opened(url: str) -> Iterator[HTTPConnection]:
    from http.client import HTTPConnection, HTTPSConnection

    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    try:
        yield connection
    finally:
        connection.close()


def _from_file(ctx: typer.Context, query: str) -> Proposals:
    """Read from SQLite's file as it is: opening it as services do might have to make or migrate it."""
    with contextlib.suppress(Exception):
        path = _database_file()
        if path is None:
            return []
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=PATIENCE_S)
        ) as file:
            return [(str(name), str(what)) for name, what in file.execute(query, (MOST,))]
    return []


def _database_file() -> Path | None:
    """None: there is none, or what serves is no SQLite."""
    from pydantic_settings import BaseSettings, SettingsConfigDict

    class Place(BaseSettings):
        """The two of service.settings.Settings that say it, without what those need."""

        model_config = SettingsConfigDict(env_prefix="KITH_", env_file=".env", extra="ignore")
        data_dir: Path = Path("data")
        database_url: str | None = None

    place = Place()
    if place.database_url is None:
        path = place.data_dir / "kith.db"
    elif place.database_url.startswith("sqlite:///"):
        path = Path(place.database_url.removeprefix("sqlite:///"))
    else:
        return None
    return path.resolve() if path.is_file() else None


def _people(store: Store, gallery: Gallery) -> Sequence[Subject]:
    from service.gallery.subjects import SubjectFilter

    return store.list_subjects(gallery, None, MOST, SubjectFilter())


def _unsealed(gallery: str, listed: Callable[[Store, Gallery], Proposals]) -> Proposals:
    """People are stored sealed: their ids need the database, and the key, opened as services do."""
    with contextlib.suppress(Exception):
        if _database_file() is None:
            return []
        from service.gallery.store import Store
        from service.opening import open_own_database
        from service.settings import load_settings

        with contextlib.closing(open_own_database(load_settings())) as database:
            store = Store(database)
            return listed(store, store.gallery(gallery))
    return []

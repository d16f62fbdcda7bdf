"""``kith keys``: who may use the service, on the database itself or through ``--url``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Protocol

import sqlalchemy as sa
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from service.api.key_schemas import KeyIn, KeyOut, NewKeyOut
from service.api.problems import validation_error
from service.client import Kith
from service.connection import AsJson, Key, Url
from service.engines import open_own_database
from service.gallery.database import Database
from service.gallery.key_store import KeyStore
from service.gallery.tables import galleries
from service.security.acting import Actor, acting_as
from service.security.keys import SCOPES, Scope
from service.settings import load_settings
from service.terminal import print_table

app = typer.Typer(help="API keys: who may use the service, and for what.", no_args_is_help=True)
KeyId = Annotated[str, typer.Argument(help="As 'kith keys list' names it.")]


class Keys(Protocol):
    """Here, or on a server."""

    def create_key(self, name: str, scopes: list[Scope], **options: Any) -> NewKeyOut: ...

    def api_keys(self, ended: bool = False) -> list[KeyOut]: ...

    def revoke_key(self, key: str) -> KeyOut: ...

    def rotate_key(self, key: str, overlap_s: int) -> NewKeyOut: ...

    def gallery_names(self) -> set[str]: ...


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="Whose it is; default: what it may do.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SCOPES)}; repeatable.")] = None,
    gallery: Annotated[
        list[str] | None, typer.Option("--gallery", "-g", help="For this gallery alone; repeatable. Default: all.")
    ] = None,
    days: Annotated[float | None, typer.Option(help="Until it expires; default: never.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second; default: KITH_RATE_LIMIT.")] = None,
    burst: Annotated[int | None, typer.Option(min=1, help="At once; default: as many as in a second.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, and print its token, which nobody can tell again."""
    scopes = _scopes(scope or [])
    for option, value in (("--days", days), ("--rate", rate)):
        if value is not None and not value > 0:
            raise typer.BadParameter(f"{value:g} is not more than 0", param_hint=option)
    if burst is not None and rate is None:
        raise typer.BadParameter("it needs a rate, too: --rate", param_hint="--burst")
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    options = {"galleries": gallery or None, "expires_at": expires_at, "rate": rate, "burst": burst}
    with _keys(url, api_key) as keys:
        _tell(keys.create_key(name or "+".join(scopes), scopes, **options), as_json)
        if gallery and (absent := sorted(set(gallery) - keys.gallery_names())):
            told = f"no gallery is called {', '.join(absent)} yet: the key is for whichever will be"
            Console(stderr=True).print(told, markup=False, highlight=False, soft_wrap=True)


@app.command(name="list")
def list_keys(
    ended: Annotated[bool, typer.Option("--ended", help="Also those that were revoked or have expired.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """All keys, the oldest first, without their tokens."""
    with _keys(url, api_key) as keys:
        found = keys.api_keys(ended)
    if as_json:
        print(json.dumps([key.model_dump(mode="json") for key in found], indent=2))
        return
    table = Table(Column("Key", no_wrap=True), "Name", "Scopes", "Galleries", "State", "Expires (UTC)", "Used (UTC)")
    for key in found:
        galleries = "all" if key.galleries is None else ", ".join(key.galleries)
        times = ("" if at is None else f"{at:%Y-%m-%d %H:%M}" for at in (key.expires_at, key.used_at))
        table.add_row(key.id, escape(key.name), ", ".join(key.scopes), galleries, key.state, *times)
    print_table(table)


@app.command()
def revoke(key: KeyId, url: Url = None, api_key: Key = None) -> None:
    """Refuse a key from now on, for good."""
    with _keys(url, api_key) as keys:
        print(f"{keys.revoke_key(key).id} is revoked")


@app.command()
def rotate(
    key: KeyId,
    overlap_hours: Annotated[float, typer.Option(min=0.0, help="For how long the old one still works.")] = 24.0,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a key with the same rights, and print its token; the old one works on for a while."""
    with _keys(url, api_key) as keys:
        _tell(keys.rotate_key(key, round(overlap_hours * 3600)), as_json)


class _Here:
    """In the database itself."""

    def __init__(self, database: Database) -> None:
        self._database, self._store = database, KeyStore(database)

    def create_key(self, name: str, scopes: list[Scope], **options: Any) -> NewKeyOut:
        asked = _asked(name=name, scopes=scopes, **options)
        return NewKeyOut.of_new(
            *self._store.create(asked.name, asked.rights, asked.expires_at, asked.rate, asked.burst)
        )

    def api_keys(self, ended: bool = False) -> list[KeyOut]:
        now = datetime.now(UTC)
        return [KeyOut.of(key) for key in self._store.list_keys() if ended or key.state(now) == "active"]

    def revoke_key(self, key: str) -> KeyOut:
        return KeyOut.of(self._store.revoke(key))

    def rotate_key(self, key: str, overlap_s: int) -> NewKeyOut:
        return NewKeyOut.of_new(*self._store.rotate(key, timedelta(seconds=overlap_s)))

    def gallery_names(self) -> set[str]:
        with self._database.read() as connection:
            return set(connection.execute(sa.select(galleries.c.name)).scalars())


@contextmanager
def _keys(url: str | None, key: str | None) -> Iterator[Keys]:
    if url is not None:
        with Kith(url, key) as kith:
            yield kith
        return
    with closing(open_own_database(load_settings())) as database, acting_as(Actor("operator")):
        yield _Here(database)


def _asked(**fields: Any) -> KeyIn:
    try:
        return KeyIn.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error.errors()) from error


def _scopes(given: list[str]) -> list[Scope]:
    if not given or not set(given) <= set(SCOPES):
        raise typer.BadParameter(f"one or more of {', '.join(SCOPES)}", param_hint="--scope")
    return [scope for scope in SCOPES if scope in given]


def _tell(key: NewKeyOut, as_json: bool) -> None:
    if as_json:
        print(key.model_dump_json(indent=2))
        return
    galleries = "all galleries" if key.galleries is None else ", ".join(key.galleries)
    expires = "never expires" if key.expires_at is None else f"expires at {key.expires_at:%Y-%m-%d %H:%M} UTC"
    told = f"key {key.id} ({key.name}): {', '.join(key.scopes)} in {galleries}; {expires}. Its token, told this once:"
    Console(stderr=True).print(told, markup=False, highlight=False, soft_wrap=True)
    print(key.token)

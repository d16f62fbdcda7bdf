"""``kith keys``: who may use the service, on the database itself or through ``--url``."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape
from rich.table import Column, Table

from service.commands.completion import complete_galleries, complete_keys
from service.commands.options import AsJson, Key, Url
from service.commands.own_database import named_settings, own_settings
from service.terminal import print_json, print_table, remark, say

if TYPE_CHECKING:
    from service.api.key_schemas import NewKeyOut
    from service.key_places import Keys

app = typer.Typer(help="API keys: who may use the service, and for what.", no_args_is_help=True)
LEAST_DAYS: Final = 1e-4
MOST_DAYS: Final = 36_500
MOST_OVERLAP_HOURS: Final = 2160
KeyId = Annotated[str, typer.Argument(help="As 'kith keys list' names it.", autocompletion=complete_keys)]


class May(StrEnum):
    """What service.security.keys calls a scope, which is slow to import."""

    identify = "identify"
    read = "read"
    enrol = "enrol"
    admin = "admin"


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="Whose it is; default: what it may do.")] = None,
    scope: Annotated[list[May] | None, typer.Option(help="What it may do; repeatable.")] = None,
    gallery: Annotated[
        list[str] | None,
        typer.Option(
            "--gallery",
            "-g",
            help="For this gallery alone; repeatable. Default: all.",
            autocompletion=complete_galleries,
        ),
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=LEAST_DAYS, max=MOST_DAYS, help="Until it expires; default: never.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Requests a second; default: KITH_RATE_LIMIT.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="At once; default: as many as in a second.")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, and print its token, which nobody can tell again."""
    if not scope:
        raise typer.BadParameter(f"one or more of {', '.join(May)}", param_hint="--scope")
    for option, value in (("--days", days), ("--rate", rate)):
        _check_number(option, value)
    if burst is not None and rate is None:
        raise typer.BadParameter("it needs a rate, too: --rate", param_hint="--burst")
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    options = {"galleries": gallery or None, "expires_at": expires_at, "rate": rate, "burst": burst}
    from service.security.keys import SCOPES

    scopes = [each for each in SCOPES if each in scope]
    with _reached(url, api_key, may_make=True) as keys:
        _tell(keys.create_key(name or "+".join(scopes), scopes, **options), as_json)
        if gallery and (absent := sorted(set(gallery) - keys.gallery_names())):
            remark(f"no gallery is called {', '.join(absent)} yet: the key is for whichever will be")


@app.command(name="list")
def list_keys(
    ended: Annotated[bool, typer.Option("--ended", help="Also those that were revoked or have expired.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """All keys, the oldest first, without their tokens."""
    with _reached(url, api_key) as keys:
        found = list(keys.api_keys(ended))
    if as_json:
        print_json(found)
        return
    if not found:
        say("no key: 'kith keys create --scope admin' makes the first, and closes the service to whoever has none")
        return
    table = Table(Column("Key", no_wrap=True), "Name", "Scopes", "Galleries", "State", "Expires (UTC)", "Used (UTC)")
    for key in found:
        galleries = "all" if key.galleries is None else ", ".join(key.galleries)
        times = ("" if at is None else f"{at:%Y-%m-%d %H:%M}" for at in (key.expires_at, key.used_at))
        table.add_row(key.id, escape(key.name), ", ".join(key.scopes), galleries, key.state, *times)
    print_table(table)


@app.command()
def revoke(key: KeyId, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """Refuse a key from now on, for good."""
    with _reached(url, api_key) as keys:
        revoked = keys.revoke_key(key)
    print_json(revoked) if as_json else say(f"{revoked.id} is revoked")


@app.command()
def rotate(
    key: KeyId,
    overlap_hours: Annotated[
        float, typer.Option(min=0.0, max=MOST_OVERLAP_HOURS, help="For how long the old one still works.")
    ] = 24.0,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a key with the same rights, and print its token; the old one works on for a while."""
    _check_number("--overlap-hours", overlap_hours)
    with _reached(url, api_key) as keys:
        _tell(keys.rotate_key(key, round(overlap_hours * 3600)), as_json)


def _reached(url: str | None, api_key: str | None, may_make: bool = False) -> AbstractContextManager[Keys]:
    """``may_make``: a database, where there is none yet."""
    from service.key_places import keys_here, keys_of_server

    if url is not None:
        return keys_of_server(url, api_key)
    return keys_here(named_settings() if may_make else own_settings())


def _check_number(option: str, value: float | None) -> None:
    """NaN is within all bounds."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is no number", param_hint=option)


def _tell(key: NewKeyOut, as_json: bool) -> None:
    if as_json:
        print_json(key)
        return
    galleries = "all galleries" if key.galleries is None else ", ".join(key.galleries)
    expires = "never expires" if key.expires_at is None else f"expires at {key.expires_at:%Y-%m-%d %H:%M} UTC"
    remark(f"key {key.id} ({key.name}): {', '.join(key.scopes)} in {galleries}; {expires}. Its token, told this once:")
    say(key.token)

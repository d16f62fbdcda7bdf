"""``kith keys``: API keys."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, get_args

import typer

from kith.wire.common import Scope
from service.cli.calls import add_call
from service.cli.connection import connect, place_of, read_settings
from service.cli.options import CommandGroup, ServerOptions
from service.cli.terminal import print_line, print_note

if TYPE_CHECKING:
    from kith.wire.keys import CreatedKeyOut, KeyOut

app = CommandGroup(help="Manage API keys and their permissions.", no_args_is_help=True)
MIN_VALIDITY_DAYS: Final = 1e-4
MAX_VALIDITY_DAYS: Final = 36_500
MAX_OVERLAP_HOURS: Final = 2160
ScopeName = StrEnum("ScopeName", get_args(Scope))  # type: ignore[misc]  # Typer takes no list of literals


def _galleries(key: KeyOut) -> object:
    return key.galleries or "all"


add_call(
    app,
    "list",
    "api_keys",
    ("Key=id", "name", "scopes", _galleries, "state", "expires_at", "used_at"),
    nothing="No API keys. 'kith keys create --scope admin' creates the first. Every request needs a key then.",
    ended=Annotated[bool, typer.Option("--ended", help="Include revoked and expired keys.")],
)
add_call(app, "revoke", "revoke_key", "Revoked API key {0.id}")


def _print_key(key: CreatedKeyOut) -> None:
    galleries = "all galleries" if key.galleries is None else ", ".join(key.galleries)
    expires = "never expires" if key.expires_at is None else f"expires at {key.expires_at:%Y-%m-%d %H:%M} UTC"
    print_note(f"Created API key {key.id} ({key.name}): {', '.join(key.scopes)} in {galleries}; {expires}.")
    print_note("Save the token now. It cannot be shown again:")
    print_line(key.token)


add_call(
    app,
    "rotate",
    "rotate_key",
    _print_key,
    overlap_s=Annotated[
        float | None,
        typer.Option(
            "--overlap-hours",
            min=0.0,
            max=MAX_OVERLAP_HOURS,
            callback=lambda hours: None if hours is None else round(hours * 3600),
            help="Hours for which the old key remains valid. Default: 24.",
        ),
    ],
)


@app.command()
def create(
    server: ServerOptions,
    name: Annotated[str | None, typer.Argument(help="Name. Default: the scopes.")] = None,
    scope: Annotated[list[ScopeName] | None, typer.Option(help="Permission; repeatable; at least one.")] = None,
    gallery: Annotated[
        list[str] | None,
        typer.Option("--gallery", "-g", help="Only this gallery; repeatable. Default: all."),
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(min=MIN_VALIDITY_DAYS, max=MAX_VALIDITY_DAYS, help="Days until expiry. Default: never."),
    ] = None,
) -> None:
    """Create an API key, and print its token. The token cannot be shown again."""
    if not scope:
        raise typer.BadParameter(f"Give at least one of {', '.join(get_args(Scope))}.", param_hint="--scope")
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    scopes = [each for each in get_args(Scope) if each in scope]
    with connect(server, "create") as kith:
        created = kith.create_key(name or "+".join(scopes), scopes, galleries=gallery or None, expires_at=expires_at)
        server.answer(created, partial(_print_key, created))
        if server.address is None:
            print_note(f"The key is valid only for servers that use {place_of(read_settings())[0]}.")
        if gallery and (missing := sorted(set(gallery) - kith.gallery_names())):
            print_note(f"These galleries do not exist yet: {', '.join(missing)}. The key works once they are created.")

"""``kith keys``: API keys."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from service.cli.calls import add_call
from service.cli.connection import connect, place_of, read_settings
from service.cli.options import CommandGroup, KeyId, ServerOptions
from service.cli.terminal import print_line, print_note

if TYPE_CHECKING:
    from kith.wire.keys import CreatedKeyOut, KeyOut

app = CommandGroup(help="Manage API keys and their permissions.", no_args_is_help=True)
MIN_VALIDITY_DAYS: Final = 1e-4
MAX_VALIDITY_DAYS: Final = 36_500
MAX_OVERLAP_HOURS: Final = 2160


ScopeName = StrEnum("ScopeName", "identify read enroll vectors admin")
"""Scopes of service.security.api_keys, which is slow to import."""


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
        raise typer.BadParameter(f"Give at least one of {', '.join(ScopeName)}.", param_hint="--scope")
    _reject_nan("--days", days)
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    from service.security.api_keys import SCOPES

    scopes = [each for each in SCOPES if each in scope]
    with connect(server, "create") as kith:
        _answer(
            kith.create_key(name or "+".join(scopes), scopes, galleries=gallery or None, expires_at=expires_at), server
        )
        if server.url is None:
            print_note(f"The key is valid only for servers that use {place_of(read_settings())[0]}.")
        if gallery and (missing := sorted(set(gallery) - kith.gallery_names())):
            print_note(f"These galleries do not exist yet: {', '.join(missing)}. The key works once they are created.")


@app.command()
def rotate(
    key: KeyId,
    server: ServerOptions,
    overlap_hours: Annotated[
        float, typer.Option(min=0.0, max=MAX_OVERLAP_HOURS, help="Hours for which the old key remains valid.")
    ] = 24.0,
) -> None:
    """Replace an API key by a new one with the same permissions, and print the new token."""
    _reject_nan("--overlap-hours", overlap_hours)
    with connect(server) as kith:
        _answer(kith.rotate_key(key, round(overlap_hours * 3600)), server)


def _reject_nan(option: str, value: float | None) -> None:
    """Reject NaN, which passes the bounds of an option."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number.", param_hint=option)


def _answer(key: CreatedKeyOut, server: ServerOptions) -> None:
    server.answer(key, lambda: _print_key(key))


def _print_key(key: CreatedKeyOut) -> None:
    galleries = "all galleries" if key.galleries is None else ", ".join(key.galleries)
    expires = "never expires" if key.expires_at is None else f"expires at {key.expires_at:%Y-%m-%d %H:%M} UTC"
    print_note(f"Created API key {key.id} ({key.name}): {', '.join(key.scopes)} in {galleries}; {expires}.")
    print_note("Save the token now. It cannot be shown again:")
    print_line(key.token)

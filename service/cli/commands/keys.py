"""``kith keys``: API keys in the local database, or on a server with ``--url``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, Unpack

import typer

from service.cli.connection import local_database, local_settings_or_new
from service.cli.options import CommandGroup, ServerOptions
from service.cli.terminal import print_line, print_note

if TYPE_CHECKING:
    from kith import Kith
    from kith.options import KeyOptions
    from kith.wire.common import Scope
    from kith.wire.keys import CreatedKeyOut, KeyOut
    from service.security.api_keys import ApiKey
    from service.storage.db.engine import Database

app = CommandGroup(help="Manage API keys and their permissions.", no_args_is_help=True)
MIN_VALIDITY_DAYS: Final = 1e-4
MAX_VALIDITY_DAYS: Final = 36_500
MAX_OVERLAP_HOURS: Final = 2160
KeyId = Annotated[str, typer.Argument(help="Key id, from 'kith keys list'.")]


ScopeName = StrEnum("ScopeName", "identify read enroll vectors admin")
"""Scopes of service.security.api_keys, which is slow to import."""


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
    rate: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Requests per second. Default: KITH_RATE_LIMIT.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Requests at once. Default: those of one second.")
    ] = None,
) -> None:
    """Create an API key, and print its token. The token cannot be shown again."""
    if not scope:
        raise typer.BadParameter(f"Give at least one of {', '.join(ScopeName)}.", param_hint="--scope")
    for option, value in (("--days", days), ("--rate", rate)):
        _reject_nan(option, value)
    if burst is not None and rate is None:
        raise typer.BadParameter("Give --rate too.", param_hint="--burst")
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    options: KeyOptions = {"galleries": gallery or None, "expires_at": expires_at, "rate": rate, "burst": burst}
    from service.security.api_keys import SCOPES

    scopes = [each for each in SCOPES if each in scope]
    with _open_keys(server, create_database=True) as keys:
        _answer(keys.create_key(name or "+".join(scopes), scopes, **options), server)
        if gallery and (missing := sorted(set(gallery) - keys.gallery_names())):
            print_note(f"These galleries do not exist yet: {', '.join(missing)}. The key works once they are created.")


@app.command("list")
def list_keys(
    server: ServerOptions,
    ended: Annotated[bool, typer.Option("--ended", help="Include revoked and expired keys.")] = False,
) -> None:
    """List API keys without their tokens, oldest first."""
    with _open_keys(server) as keys:
        found = list(keys.api_keys(ended))
    server.answer_list(
        found,
        ("Key", "Name", "Scopes", "Galleries", "State", "Expires (UTC)", "Used (UTC)"),
        lambda key: (key.id, key.name, key.scopes, key.galleries or "all", key.state, key.expires_at, key.used_at),
        "No API keys. 'kith keys create --scope admin' creates the first. Every request needs a key then.",
    )


@app.command()
def revoke(key: KeyId, server: ServerOptions) -> None:
    """Revoke an API key permanently."""
    with _open_keys(server) as keys:
        revoked = keys.revoke_key(key)
    server.answer(revoked, f"Revoked API key {revoked.id}")


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
    with _open_keys(server) as keys:
        _answer(keys.rotate_key(key, round(overlap_hours * 3600)), server)


class _LocalKeys:
    """API keys of the local database, with the methods of the client."""

    def __init__(self, database: Database) -> None:
        from service.storage.repositories.api_keys import KeyStore

        self._store = KeyStore(database)
        self.gallery_names = self._store.gallery_names

    def create_key(self, name: str, scopes: list[Scope], **options: Unpack[KeyOptions]) -> CreatedKeyOut:
        from pydantic import ValidationError

        from kith.wire.keys import KeyIn
        from service.api.http.problems import validation_error
        from service.security.api_keys import rights_of

        try:
            key = KeyIn.model_validate({"name": name, "scopes": scopes, **options})
        except ValidationError as error:
            raise validation_error(error.errors()) from error
        return _created(*self._store.create(key.name, rights_of(key), key.expires_at, key.rate, key.burst))

    def api_keys(self, ended: bool) -> list[KeyOut]:
        from service.security.api_keys import to_key_out

        return [to_key_out(key) for _, key in self._store.list_keys(ended)]

    def revoke_key(self, key: str) -> KeyOut:
        from service.security.api_keys import to_key_out

        return to_key_out(self._store.revoke(key))

    def rotate_key(self, key: str, overlap_s: int) -> CreatedKeyOut:
        return _created(*self._store.rotate(key, timedelta(seconds=overlap_s)))


def _created(key: ApiKey, token: str) -> CreatedKeyOut:
    from kith.wire.keys import CreatedKeyOut
    from service.security.api_keys import to_key_out

    return CreatedKeyOut(**vars(to_key_out(key)), token=token)


@contextmanager
def _open_keys(server: ServerOptions, create_database: bool = False) -> Iterator[Kith | _LocalKeys]:
    """Open the keys of the server at --url, or of the local database. Raises MasterKeyError, StorageError."""
    if server.url is not None:
        from kith import Kith

        with Kith(server.url, server.api_key) as kith:
            yield kith
    else:
        with local_database(local_settings_or_new() if create_database else None) as database:
            yield _LocalKeys(database)


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

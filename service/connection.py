"""What a command talks to: a server by ``--url``, or a service that runs as long as the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import Annotated

import typer

from service.client import Kith
from service.settings import load_settings

Url = Annotated[str | None, typer.Option(envvar="KITH_URL", help="Server to talk to; default: the local database.")]
Key = Annotated[str | None, typer.Option(envvar="KITH_CLIENT_KEY", help="API key for --url.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def connect(url: str | None, key: str | None) -> Iterator[Kith]:
    """A client of ``url``, or of a service that runs as long as the block."""
    if url is not None:
        with Kith(url, key) as kith:
            yield kith
        return
    # Imported here: doctor must run where what serving needs is broken or absent.
    from service.server import embedded

    # A key of its own: whoever has the database is its operator, and nobody else on the machine is to use the service.
    own_key = token_hex(32)
    with embedded(load_settings(api_key=own_key)) as own, Kith(own, own_key) as kith:
        yield kith

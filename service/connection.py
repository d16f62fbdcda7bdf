"""What a command talks to: a server by ``--url``, or a service that runs as long as the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from service.client import Kith
from service.settings import load_settings

Url = Annotated[str | None, typer.Option(envvar="KITH_URL", help="Server to talk to; default: the local database.")]
Key = Annotated[
    str | None, typer.Option(envvar="KITH_CLIENT_KEY", help="API key for --url (the server's KITH_API_KEY).")
]
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

    settings = load_settings()
    own_key = settings.api_key.get_secret_value() if settings.api_key else None
    with embedded(settings) as own, Kith(own, own_key) as kith:
        yield kith

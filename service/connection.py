"""What a command talks to: a server by ``--url``, or a service that runs as long as the command."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import TYPE_CHECKING

from service.terminal import remark

if TYPE_CHECKING:
    from service.client import Kith, KithClientError


@contextmanager
def connect(url: str | None, key: str | None) -> Iterator[Kith]:
    """A client of ``url``, or of a service that runs as long as the block.

    Raises:
        KithClientError: as the block does; of a gallery that is not there, with the names of those like it.
    """
    from service.client import Kith, KithClientError

    with _reached(url, key) as (address, its_key), Kith(address, its_key) as kith:
        try:
            yield kith
        except KithClientError as error:
            if error.code == "gallery_not_found":
                _name_those_like_it(kith, error)
            raise


@contextmanager
def _reached(url: str | None, key: str | None) -> Iterator[tuple[str, str | None]]:
    if url is not None:
        yield url, key
        return
    # Imported here: doctor must run where what serving needs is broken or absent.
    from service.server import embedded
    from service.settings import load_settings

    # A key of its own: whoever has the database is its operator, and nobody else on the machine is to use the service.
    own_key = token_hex(32)
    settings = load_settings(api_key=own_key)
    file = settings.database_file
    is_new = file is not None and not file.is_file()
    with embedded(settings) as own:
        if is_new:
            remark(f"made a new database: {file}")
        yield own, own_key


def _name_those_like_it(kith: Kith, error: KithClientError) -> None:
    from service.client import KithClientError

    asked = str(error.problem.get("detail", "")).partition("'")[2].partition("'")[0]
    with suppress(KithClientError):  # who may not list them is told no more than before
        near = difflib.get_close_matches(asked, kith.gallery_names(), n=3, cutoff=0.5)
        if near:
            error.problem["near"] = near

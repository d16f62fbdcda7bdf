"""Targets of a command: a server, an embedded service, or the local database."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from service.cli.terminal import print_note
from service.core.errors import LocalError

if TYPE_CHECKING:
    from kith import Kith, KithClientError
    from service.cli.options import ServerOptions
    from service.settings import Settings
    from service.storage.db.engine import Database

Missing = Literal["refuse", "create", "temporary"]
SERVER_REMEDY: Final = (
    "Set KITH_URL or --url to your server's address, or KITH_DATA_DIR to the folder of its data. 'kith enroll' and "
    "'kith gallery create' create a database."
)


@contextmanager
def connect(options: ServerOptions, missing: Missing = "refuse") -> Iterator[Kith]:
    """Yield a client of the server at ``options.address``, or of a service that runs as long as the block.

    ``missing``: what to do if that service's database does not exist. A command that reads refuses, one that stores
    creates the database, and one that needs no stored data uses a temporary one.

    Raises:
        no_database: there is no server address and no database.
        KithClientError: a request failed. ``asked`` in its problem names the server or database that lacks a resource.
            ``gallery_not_found`` also lists similar gallery names.
    """
    from kith import Kith, KithClientError

    with _server_address(options, missing) as (url, key, asked), Kith(url, key) as kith:
        try:
            yield kith
        except KithClientError as error:
            if error.code.endswith("_not_found"):
                error.problem["asked"] = asked
            if error.code == "gallery_not_found":
                _add_similar_names(kith, error)
            raise


def read_settings(**overrides: object) -> Settings:
    """Return :func:`service.settings.load_settings`, which is slow to import."""
    from service.settings import load_settings

    return load_settings(**overrides)


def local_settings(must_exist: bool = True) -> Settings:
    """Return the settings of a command that works on the local database and ignores KITH_URL.

    Raises:
        no_database: ``must_exist`` is set and the file is missing. Opening it would create an empty database.
    """
    settings = read_settings()
    place, is_missing = place_of(settings)
    ignored = bool(os.environ.get("KITH_URL"))
    if must_exist and is_missing:
        raise LocalError("no_database", f"no database at {place}{'; this command ignores KITH_URL' if ignored else ''}")
    if ignored:
        print_note(f"This command ignores KITH_URL and uses the local database: {place}")
    return settings


@contextmanager
def local_database(settings: Settings | None = None) -> Iterator[Database]:
    """Open the local database, by default that of :func:`local_settings`. The audit names the operator as the actor.

    Raises MasterKeyError, StorageError."""
    from service.core.actor import Actor, acting_as
    from service.resources import open_own_database

    with acting_as(Actor("operator")), closing(open_own_database(settings or local_settings())) as database:
        yield database


def temporary_settings(folder: Path, api_key: str | None) -> Settings:
    """Return the settings of a service whose data is in ``folder``, encrypted with a random master key."""
    return read_settings(
        data_dir=folder,
        api_key=api_key,
        models_dir=read_settings().models_path,
        database_url=None,
        milvus_uri=None,
        master_key=token_hex(32),
        master_key_file=None,
    )


@contextmanager
def _server_address(options: ServerOptions, missing: Missing) -> Iterator[tuple[str, str | None, str]]:
    """Yield the address, the API key, and the server or database in words."""
    if options.address is not None:
        yield options.address, options.api_key, f"the server {options.address}"
        return
    from service.server import embedded

    # A random key keeps other users of this machine out of the embedded service.
    key = token_hex(32)
    settings = read_settings(api_key=key)
    place, is_missing = place_of(settings)
    with ExitStack() as stack:
        if is_missing and missing == "refuse":
            raise LocalError("no_database", f"KITH_URL is not set, and there is no database at {place}", SERVER_REMEDY)
        if is_missing and missing == "temporary":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = temporary_settings(folder, api_key=key)
        url = stack.enter_context(embedded(settings))
        if is_missing and missing == "create":
            print_note(f"Created a new database: {place}")
        yield url, key, f"the database {place}, as KITH_URL is not set"


def place_of(settings: Settings) -> tuple[str, bool]:
    """Return the database's file, or its address without credentials, and whether it is a file that is missing."""
    if (file := settings.database_file) is not None:
        return str(file.absolute()), not file.is_file()
    parts = urlsplit(settings.sql_url)
    return f"{parts.hostname or 'localhost'}{parts.path}", False


def _add_similar_names(kith: Kith, error: KithClientError) -> None:
    from kith import KithClientError

    name = str(error.problem.get("detail", "")).partition("'")[2].partition("'")[0]
    with suppress(KithClientError):  # the key may not be allowed to list galleries
        if near := difflib.get_close_matches(name, kith.gallery_names(), n=3, cutoff=0.5):
            error.problem["near"] = near

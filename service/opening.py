"""The database, its master key, the galleries' indexes and where traces go, by the settings."""

from __future__ import annotations

import tempfile
from contextlib import closing
from importlib.metadata import version
from typing import TYPE_CHECKING, cast

from service.errors import StorageError
from service.gallery.database import UNOPENED, Database, open_database
from service.gallery.key_store import KeyStore
from service.gallery.shared_indexes import SharedIndexes
from service.security.key_command import KeyCommand
from service.security.master import GivenKeys, KeyFile, MasterKeys, Source
from service.security.sealing import new_key
from service.settings import Settings

if TYPE_CHECKING:
    from service.gallery.milvus_index import IndexKind
    from service.gallery.milvus_replica import MilvusEngine
    from service.tracing import Tracing


def open_own_database(settings: Settings) -> Database:
    """Raises MasterKeyError, StorageError."""
    if _is_new(settings):
        _check_new(settings)
    return open_database(settings.sql_url, master_keys(settings))


def check_database(settings: Settings) -> None:
    """Check that the database can be opened, or made; a start that fails later leaves no new one behind.

    Raises:
        MasterKeyError, StorageError, SettingsError: it cannot be opened.
    """
    if _is_new(settings):
        _check_new(settings)
    else:
        open_own_database(settings).close()


def _is_new(settings: Settings) -> bool:
    """Whether opening the database makes a file."""
    file = settings.database_file
    return file is not None and not str(file).startswith((":memory:", "file:")) and not file.exists()


def _check_new(settings: Settings) -> None:
    """Find out whether a database and its keys can be made, without making anything."""
    keys = master_keys_at_hand(settings)
    if keys is not None:
        wrapper = keys.first()
        wrapper.unwrap(wrapper.wrap(new_key(), "check"), "check")
    assert settings.database_file is not None  # noqa: S101 - callers look first
    folder = settings.database_file.absolute().parent
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise StorageError(f"the database cannot be made in {folder}: {error.strerror}", UNOPENED) from error


def has_keys(settings: Settings) -> bool:
    """Whether API keys were ever made. Raises MasterKeyError, StorageError."""
    if _is_new(settings):
        return False
    with closing(open_own_database(settings)) as database:
        return len(KeyStore(database).ring()) > 0


def master_keys(settings: Settings) -> MasterKeys:
    """Those that the settings name, or else the data directory's own, of which the first is made where a database has
    none yet. Raises MasterKeyError."""
    sources: list[Source] = []
    if settings.master_key_command is not None:
        sources.append(KeyCommand(settings.master_key_command_line))
    if settings.master_key is not None:
        sources.append(GivenKeys(settings.master_key.get_secret_value(), "KITH_MASTER_KEY"))
    if settings.master_key_file is not None:
        sources.append(KeyFile(settings.master_key_file))
    return MasterKeys(*(sources or [KeyFile(settings.default_key_path, may_make=True)]))


def master_keys_at_hand(settings: Settings) -> MasterKeys | None:
    """As :func:`master_keys`; None is made where there is none. Raises MasterKeyError."""
    given = (settings.master_key, settings.master_key_file, settings.master_key_command) != (None, None, None)
    return master_keys(settings) if given or settings.default_key_path.exists() else None


def open_milvus(settings: Settings, database: Database) -> MilvusEngine | None:
    """Milvus, if the settings name one. Raises SettingsError if the package for it is not installed."""
    settings.check_extras()
    if settings.milvus_uri is None:
        return None
    from service.gallery.milvus_index import MilvusOptions  # an extra, and slow to import
    from service.gallery.milvus_replica import MilvusEngine

    token = settings.milvus_token.get_secret_value() if settings.milvus_token else ""
    kind = cast("IndexKind", settings.milvus_index)
    return MilvusEngine(
        MilvusOptions(settings.milvus_uri, token, kind, settings.milvus_prefix), SharedIndexes(database)
    )


def open_tracing(settings: Settings) -> Tracing | None:
    """What makes spans, if the settings say where they go. Raises SettingsError if the package for it is not
    installed."""
    settings.check_extras()
    if settings.traces_url is None:
        return None
    from service.tracing import Tracing  # an extra, and slow to import

    return Tracing(settings.traces_url, version("kith-face"))

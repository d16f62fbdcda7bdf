"""Resources that the settings name, opened for the application and commands: database, master keys and Milvus."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from service.core.errors import StorageError
from service.security.master_keys import GivenKeys, KeyFile, MasterKeys, Source
from service.settings import Settings
from service.storage.db.engine import Database, open_database
from service.storage.db.file_system import OPEN_REMEDY, check_database_file, check_writable
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.shared_indexes import SharedIndexes

if TYPE_CHECKING:
    from service.index.milvus_follower import MilvusEngine


def open_own_database(settings: Settings) -> Database:
    """Open the configured database, and create it if it is missing. Raises MasterKeyError, StorageError."""
    if _is_missing(settings):
        _check_creation(settings)
    return open_database(settings.sql_url, master_keys(settings))


def keep_nothing(settings: Settings, folder: Path) -> Settings:
    """Return the settings of a stateless service: database, keys and uploads are in a temporary ``folder``.

    The folder gets no photos, embeddings or names, since the routes that store any are missing.
    """
    master = {"master_key": None, "master_key_file": None}
    return settings.model_copy(update={"data_dir": folder, "models_dir": settings.models_path, **master})


def check_database(settings: Settings) -> None:
    """Check that the database can be opened or created, and uploads be stored. Creates nothing, as a later step of the
    start may fail.

    Raises MasterKeyError, StorageError, SettingsError.
    """
    if settings.stateless:
        return
    check_rights(settings)
    if _is_missing(settings):
        _check_creation(settings)
    else:
        open_own_database(settings).close()


def check_rights(settings: Settings) -> None:
    """Check that this process may write the data directory and an SQLite database, without opening it.

    Raises StorageError.
    """
    check_writable(_existing(settings.data_dir / "spool"))
    if (file := settings.database_file) is not None:
        check_writable(_existing(file.parent))
        if file.exists():
            check_database_file(file)


def database_exists(settings: Settings) -> bool:
    """Return whether there is a database to open. One of PostgreSQL may still be empty."""
    return not settings.stateless and not _is_missing(settings)


def _is_missing(settings: Settings) -> bool:
    """Return True if opening the database would create a file."""
    file = settings.database_file
    return file is not None and not file.exists()


def _check_creation(settings: Settings) -> None:
    """Check that the keys of a new database can be read or created, without creating them."""
    configured = (settings.master_key, settings.master_key_file) != (None, None)
    if configured or settings.default_key_path.exists():
        master_keys(settings).first()


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists. Raises StorageError: it is a file."""
    found = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not found.is_dir():
        raise StorageError(f"{found} is not a folder", OPEN_REMEDY)
    return found


def has_keys(settings: Settings) -> bool:
    """Return True if any API key was ever created. Raises MasterKeyError, StorageError."""
    if not database_exists(settings):
        return False
    with closing(open_own_database(settings)) as database:
        return len(KeyStore(database).ring()) > 0


def master_keys(settings: Settings) -> MasterKeys:
    """Return the configured master keys, by default those in the data directory.

    A new database creates a missing key file there. Raises MasterKeyError.
    """
    sources: list[Source] = []
    if settings.master_key is not None:
        sources.append(GivenKeys(settings.master_key.get_secret_value(), "KITH_MASTER_KEY"))
    if settings.master_key_file is not None:
        sources.append(KeyFile(settings.master_key_file))
    return MasterKeys(*(sources or [KeyFile(settings.default_key_path, may_make=True)]))


def open_milvus(settings: Settings, database: Database) -> MilvusEngine | None:
    """Connect to Milvus if it is configured."""
    if settings.milvus_uri is None:
        return None
    from service.index.milvus import Milvus  # optional dependency, slow to import
    from service.index.milvus_follower import MilvusEngine

    token = settings.milvus_token.get_secret_value() if settings.milvus_token else ""
    return MilvusEngine(Milvus(settings.milvus_uri, token), SharedIndexes(database))

"""For commands that look at this machine's database, whatever server the environment names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from service.errors import DatabaseMissingError
from service.terminal import remark

if TYPE_CHECKING:
    from service.settings import Settings


def own_settings(existing: bool = True) -> Settings:
    """Says which database is looked at, where KITH_URL might have one think of another.

    Raises:
        DatabaseMissingError: ``existing``, and there is no such file. It would be made, empty, and its master key.
    """
    from service.settings import load_settings

    settings = load_settings()
    file = settings.database_file
    place = str(file) if file is not None else _place(settings.sql_url)
    elsewhere = "KITH_URL does not count for this command" if os.environ.get("KITH_URL") else ""
    if existing and file is not None and not file.is_file():
        raise DatabaseMissingError(f"no database at {place}{'; ' if elsewhere else ''}{elsewhere}")
    if elsewhere:
        remark(f"{elsewhere}: it looks at the database of this machine, {place}")
    return settings


def named_settings() -> Settings:
    """For a command that may begin a database: says which one it uses, or makes."""
    from service.settings import load_settings

    settings = load_settings()
    file = settings.database_file
    if file is None:
        remark(f"in the database {_place(settings.sql_url)}")
    elif file.is_file():
        remark(f"in the database {file.absolute()}")
    else:
        remark(
            f"no database at {file.absolute()}: it is made now, and its master key if none is named. Only a server "
            "that uses this database knows the key (KITH_DATA_DIR, KITH_DATABASE_URL)"
        )
    return settings


def _place(url: str) -> str:
    """Without who opens it by which password."""
    parts = urlsplit(url)
    return f"{parts.hostname or 'localhost'}{parts.path}"

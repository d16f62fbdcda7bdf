"""Where the galleries' indexes are, by the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from service.gallery.database import Database
from service.gallery.shared_indexes import SharedIndexes
from service.settings import Settings

if TYPE_CHECKING:
    from service.gallery.milvus_index import IndexKind
    from service.gallery.milvus_replica import MilvusEngine


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

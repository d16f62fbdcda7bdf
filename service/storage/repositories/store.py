"""Repositories of galleries and their contents, on one database."""

from __future__ import annotations

from functools import partial

from service.storage.db.engine import Database
from service.storage.repositories.albums import AlbumStore
from service.storage.repositories.change_log import ChangeLog
from service.storage.repositories.crops import CropStore
from service.storage.repositories.decoys import DecoyStore
from service.storage.repositories.evidence import EvidenceStore
from service.storage.repositories.galleries import GalleryStore
from service.storage.repositories.read_cache import ReadCache
from service.storage.repositories.strangers import StrangerStore
from service.storage.repositories.subjects import SubjectStore
from service.storage.repositories.templates import TemplateStore


class Store:
    """Galleries and what they contain, with the cache that they share. Thread-safe. Writes are on disk on return."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.cache = ReadCache(partial(database.file_version, wait=False))
        self.galleries = GalleryStore(database, self.cache)
        self.subjects = SubjectStore(database, self.cache)
        self.templates = TemplateStore(database, self.cache)
        self.crops = CropStore(database)
        self.decoys = DecoyStore(database, self.cache)
        self.albums = AlbumStore(database, self.cache)
        self.strangers = StrangerStore(database, self.cache)
        self.changes = ChangeLog(database)
        self.evidence = EvidenceStore(database)

    def close(self) -> None:
        self.database.close()

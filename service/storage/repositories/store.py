"""Repositories on one database."""

from __future__ import annotations

from service.storage.db.engine import Database
from service.storage.events.log import EventLog
from service.storage.repositories.albums import AlbumStore
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.change_log import ChangeLog
from service.storage.repositories.crops import CropStore
from service.storage.repositories.decoys import DecoyStore
from service.storage.repositories.erasures import ErasureStore
from service.storage.repositories.evidence import EvidenceStore
from service.storage.repositories.galleries import GalleryStore
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.read_cache import ReadCache
from service.storage.repositories.receivers import ReceiverStore
from service.storage.repositories.strangers import StrangerStore
from service.storage.repositories.subjects import SubjectStore
from service.storage.repositories.templates import TemplateStore
from service.storage.repositories.webhooks import WebhookStore


class Store:
    """All repositories of a server, with the cache that they share. Thread-safe. Writes are on disk on return."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.cache = ReadCache(database.file_version)
        self.galleries = GalleryStore(database, self.cache)
        self.subjects = SubjectStore(database, self.cache)
        self.templates = TemplateStore(database, self.cache)
        self.crops = CropStore(database)
        self.decoys = DecoyStore(database, self.cache)
        self.albums = AlbumStore(database, self.cache)
        self.strangers = StrangerStore(database, self.cache)
        self.changes = ChangeLog(database)
        self.evidence = EvidenceStore(database)
        self.generations = GenerationStore(database)
        self.erasures = ErasureStore(database)
        self.jobs = JobStore(database)
        self.keys = KeyStore(database)
        self.events = EventLog(database)
        self.receivers = ReceiverStore(database)
        self.webhooks = WebhookStore(database)

    def close(self) -> None:
        self.database.close()

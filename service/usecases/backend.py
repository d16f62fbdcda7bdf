"""Dependencies of the use cases, as `service.wiring` builds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, TypeVarTuple

from models.runtime.network import Network
from service.core.actor import Threads
from service.core.deadlines import Turns
from service.core.errors import GalleryMovedError, GalleryNotFoundError
from service.domain.gallery import Gallery
from service.index.follower import Followers
from service.index.protocol import SharedEngine
from service.inference.batcher import Batcher
from service.inference.photo_pipeline import PhotoPipeline
from service.inference.recognizers import Recognizers
from service.jobs.heavy_work import HeavyWork
from service.jobs.runner import Runner
from service.jobs.spool import Spool
from service.observability.metrics import Metrics
from service.operations.housekeeping import Housekeeping
from service.operations.metrics_export import MetricsExport
from service.operations.status import Readiness, RecentState
from service.operations.transfers import Transfers
from service.operations.webhook_delivery import Webhooks
from service.risk.drift import Watches
from service.risk.gallery_risks import GalleryRisks
from service.risk.search import GallerySearch
from service.settings import Settings
from service.storage.audit.writer import AuditWriter
from service.storage.privacy.retention import Retention
from service.storage.repositories.store import Store

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Everything that requests and jobs work with.

    Attributes:
        threads: the one pool for the blocking work of requests: decoding, database, searches.
        networks: by batcher, the detector's first.
        enrolling: turns by gallery key, to check the identity of templates and store them. Without turns, concurrent
            requests would each be checked before the others are stored. Writes of other processes are detected when
            storing.
    """

    settings: Settings
    metrics: Metrics
    threads: Threads
    # Photos
    networks: Mapping[Batcher[Any, Any], Network]
    photos: PhotoPipeline
    recognizers: Recognizers
    # Galleries
    store: Store
    retention: Retention
    transfers: Transfers
    shared_engine: SharedEngine | None
    followers: Followers
    risks: GalleryRisks
    search: GallerySearch
    watches: Watches
    enrolling: Turns = field(default_factory=Turns)
    # Work behind the requests
    spool: Spool
    heavy: HeavyWork
    jobs: Runner
    housekeeping: Housekeeping
    webhooks: Webhooks
    # Keys and what watches the service
    audit: AuditWriter
    readiness: Readiness
    recent_state: RecentState
    telemetry: MetricsExport

    async def find_gallery(self, name: str) -> Gallery:
        """Return a gallery, from the cache if it is current. Raises GalleryNotFoundError."""
        cached = self.store.cache.current(name)
        return await self.threads.run(self.store.galleries.get, name) if cached is None else cached

    async def run_on_gallery(
        self, gallery: str | Gallery, function: Callable[[Gallery, *Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Run a blocking function on the current gallery, again if the gallery moves to another recognizer meanwhile.

        ``gallery``: a name, or the gallery as it was when the request began.
        """
        current = await (self.find_gallery(gallery) if isinstance(gallery, str) else self.reload_gallery(gallery))
        while True:
            try:
                return await self.threads.run(function, current, *arguments)
            except GalleryMovedError:
                current = await self.reload_gallery(current)

    async def change_templates(
        self, gallery: str | Gallery, function: Callable[[Gallery, *Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Run a change of templates as :meth:`run_on_gallery`, then derive the gallery's risk again if it is stale."""
        done = await self.run_on_gallery(gallery, function, *arguments)
        self.risks.derive_later(await self.find_gallery(gallery if isinstance(gallery, str) else gallery.name))
        return done

    async def reload_gallery(self, gallery: Gallery) -> Gallery:
        """Return the current state of ``gallery`` with its original erasure number.

        The store uses that number to reject subjects that were erased since the request began.

        Raises GalleryNotFoundError: the gallery was deleted, even if a new gallery has its name.
        """
        return as_of(gallery, await self.find_gallery(gallery.name))


def as_of(snapshot: Gallery, current: Gallery) -> Gallery:
    """Return the current gallery with the erasure number of a snapshot. Raises as :meth:`Backend.reload_gallery`."""
    if current.pk != snapshot.pk:
        raise GalleryNotFoundError(f"gallery {snapshot.name!r} was deleted during the request")
    return replace(current, erased=snapshot.erased)

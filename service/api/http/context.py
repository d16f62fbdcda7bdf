"""Objects that a request needs, built once by service.app and passed to every route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, TypeVarTuple, cast

from fastapi import Depends, Request

from models.runtime.network import Network
from service.api.http.probe_budget import ProbeBudget
from service.core.errors import GalleryMovedError, GalleryNotFoundError
from service.domain.gallery import Gallery
from service.index.follower import Followers
from service.index.protocol import SharedEngine
from service.inference.batcher import Batcher
from service.inference.recognizers import Recognizers
from service.inference.url_fetching import UrlFetcher
from service.observability.metrics import Metrics
from service.risk.drift import Watches
from service.services.heavy_work import HeavyWork
from service.services.job_runner import Runner
from service.services.key_usage import KeyUses
from service.services.metrics_export import MetricsExport
from service.services.pipeline import Pipeline
from service.services.readiness import Readiness
from service.services.shadow import Shadow
from service.services.spool import Spool
from service.services.status import RecentState
from service.services.transfers import Transfers
from service.services.webhook_delivery import Webhooks
from service.settings import Settings
from service.storage.audit.writer import AuditWriter
from service.storage.privacy.retention import Retention
from service.storage.privacy.subject_access import SubjectAccess
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.erasures import ErasureStore
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.store import Store

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, kw_only=True)
class Context:
    settings: Settings
    detection_network: Network
    recognizers: Recognizers
    store: Store
    retention: Retention
    erasures: ErasureStore
    subject_access: SubjectAccess
    generations: GenerationStore
    shadow: Shadow
    followers: Followers
    shared_engine: SharedEngine | None
    pipeline: Pipeline
    watches: Watches
    telemetry: MetricsExport
    heavy: HeavyWork
    jobs: Runner
    spool: Spool
    transfers: Transfers
    audit: AuditWriter
    probes: ProbeBudget
    keys: KeyStore
    key_uses: KeyUses
    fetcher: UrlFetcher
    webhooks: Webhooks
    metrics: Metrics
    readiness: Readiness
    recent_state: RecentState
    batchers: Sequence[Batcher[Any, Any]]

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run a blocking function in a worker thread."""
        return await self.pipeline.in_thread(function, *arguments)

    async def find_gallery(self, name: str) -> Gallery:
        """Return a gallery, from the cache if it is current. Raises GalleryNotFoundError."""
        cached = self.store.galleries.get_cached(name)
        return await self.run(self.store.galleries.get, name) if cached is None else cached

    async def run_on_gallery(
        self, gallery: str | Gallery, function: Callable[[Gallery, *Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Run a blocking function on the current gallery, again if the gallery moves to another recognizer meanwhile.

        ``gallery``: a name, or the gallery as it was when the request began.
        """
        current = await (self.find_gallery(gallery) if isinstance(gallery, str) else self.reload_gallery(gallery))
        while True:
            try:
                return await self.run(function, current, *arguments)
            except GalleryMovedError:
                current = await self.reload_gallery(current)

    async def reload_gallery(self, gallery: Gallery) -> Gallery:
        """Return the current state of ``gallery`` with its original erasure number.

        The store uses that number to reject subjects that were erased since the request began.

        Raises GalleryNotFoundError: the gallery was deleted, even if a new gallery has its name.
        """
        current = await self.find_gallery(gallery.name)
        if current.pk != gallery.pk:
            raise GalleryNotFoundError(f"gallery {gallery.name!r} was deleted during the request")
        return replace(current, erased=gallery.erased)


def context_of(request: Request) -> Context:
    return cast(Context, request.app.state.context)


async def _context(request: Request) -> Context:  # async: FastAPI calls synchronous dependencies in a thread
    return context_of(request)


ContextDep = Annotated[Context, Depends(_context)]

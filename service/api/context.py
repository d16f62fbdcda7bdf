"""What a request needs, built once by service.app and handed to every route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, TypeVarTuple, cast

from fastapi import Depends, Request

from models.network import Network
from service.api.probes import ProbeBudget
from service.audit_writer import AuditWriter
from service.batching import Batcher
from service.drift import Watches
from service.errors import GalleryMovedError, GalleryNotFoundError
from service.fetching import Fetcher
from service.gallery.erasure import Erasures
from service.gallery.follower import Followers
from service.gallery.generations import Generations
from service.gallery.index import SharedEngine
from service.gallery.key_store import KeyStore
from service.gallery.retention import Retention
from service.gallery.store import Store
from service.gallery.subject_access import SubjectAccess
from service.gallery.subjects import Gallery
from service.jobs import Runner
from service.key_uses import KeyUses
from service.measures import Measures
from service.pipeline import Pipeline
from service.readiness import Readiness
from service.recognisers import Recognisers
from service.samples import Samples
from service.settings import Settings
from service.shadow import Shadow
from service.spool import Spool
from service.telemetry import Telemetry
from service.transfers import Transfers

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, kw_only=True)
class Context:
    settings: Settings
    detection_network: Network
    recognisers: Recognisers
    store: Store
    retention: Retention
    erasures: Erasures
    subject_access: SubjectAccess
    generations: Generations
    shadow: Shadow
    followers: Followers
    shared_engine: SharedEngine | None
    pipeline: Pipeline
    watches: Watches
    telemetry: Telemetry
    jobs: Runner
    spool: Spool
    transfers: Transfers
    audit: AuditWriter
    probes: ProbeBudget
    keys: KeyStore
    key_uses: KeyUses
    fetcher: Fetcher
    measures: Measures
    readiness: Readiness
    samples: Samples
    batchers: Sequence[Batcher[Any, Any]]

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run something that blocks, away from the event loop."""
        return await self.pipeline.in_thread(function, *arguments)

    async def gallery(self, name: str) -> Gallery:
        """Raises GalleryNotFoundError."""
        known = self.store.gallery_at_once(name)
        return await self.run(self.store.gallery, name) if known is None else known

    async def change(
        self, gallery: str | Gallery, function: Callable[[Gallery, *Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Run something with a gallery as it is, which a request may have begun with; again where it moved to another
        recogniser meanwhile."""
        found = await (self.gallery(gallery) if isinstance(gallery, str) else self.gallery_again(gallery))
        while True:
            try:
                return await self.run(function, found, *arguments)
            except GalleryMovedError:
                found = await self.gallery_again(found)

    async def gallery_again(self, found: Gallery) -> Gallery:
        """As it is now, for a request that began with ``found``: it stores nobody who was erased since. Raises
        GalleryNotFoundError: it was deleted since, even if there is another one of its name."""
        now = await self.gallery(found.name)
        if now.pk != found.pk:
            raise GalleryNotFoundError(f"gallery {found.name!r} was deleted meanwhile")
        return replace(now, erased=found.erased)


async def _context(request: Request) -> Context:  # async, or FastAPI would call it in a thread
    return cast(Context, request.app.state.context)


Kith = Annotated[Context, Depends(_context)]

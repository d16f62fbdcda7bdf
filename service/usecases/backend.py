"""Dependencies of the use cases, in four groups that `service.wiring` builds, and their processing of photos."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, TypeVarTuple

from models.runtime.network import Network
from service.core.actor import RequestThreads
from service.core.deadlines import Turns
from service.core.errors import GalleryMovedError, GalleryNotFoundError, ImageError, InvalidRequestError
from service.domain.gallery import Gallery
from service.index.follower import Followers
from service.index.protocol import SharedEngine
from service.inference.batcher import Batcher
from service.inference.photo_pipeline import Photo, PhotoPipeline
from service.inference.recognizers import Recognizers
from service.inference.url_fetching import UrlFetcher
from service.jobs.heavy_work import HeavyWork
from service.jobs.runner import Runner
from service.jobs.spool import Spool
from service.observability.metrics import Metrics
from service.operations.housekeeping import Housekeeping, KeyUses
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
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.erasures import ErasureStore
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.store import Store

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, kw_only=True)
class Faces:
    """From photos to faces and embeddings. ``networks``: by batcher, the detector's first."""

    photos: PhotoPipeline
    recognizers: Recognizers
    fetcher: UrlFetcher
    networks: Mapping[Batcher[Any, Any], Network]

    @property
    def detection_network(self) -> Network:
        return next(iter(self.networks.values()))


@dataclass(frozen=True, kw_only=True)
class Galleries:
    """Enrolled subjects, their indexes and their risks.

    ``enrolling``: turns by gallery key, to check the identity of templates and store them. Without turns, concurrent
    requests would each be checked before the others are stored. Writes of other processes are detected when storing.
    """

    store: Store
    followers: Followers
    shared_engine: SharedEngine | None
    search: GallerySearch
    risks: GalleryRisks
    watches: Watches
    generations: GenerationStore
    retention: Retention
    erasures: ErasureStore
    transfers: Transfers
    enrolling: Turns = field(default_factory=Turns)


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Background jobs, the files that they read, housekeeping, and the computations over whole galleries."""

    runner: Runner
    spool: Spool
    heavy: HeavyWork
    housekeeping: Housekeeping


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Keys, audit, webhooks, and what monitors the service."""

    keys: KeyStore
    key_uses: KeyUses
    audit: AuditWriter
    webhooks: Webhooks
    metrics: Metrics
    telemetry: MetricsExport
    readiness: Readiness
    recent_state: RecentState


@dataclass(frozen=True, kw_only=True)
class Backend:
    settings: Settings
    threads: RequestThreads
    faces: Faces
    galleries: Galleries
    jobs: Jobs
    operations: Operations

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run a blocking function in a thread of requests."""
        return await self.threads.run(function, *arguments)

    async def find_gallery(self, name: str) -> Gallery:
        """Return a gallery, from the cache if it is current. Raises GalleryNotFoundError."""
        cached = self.galleries.store.galleries.get_cached(name)
        return await self.run(self.galleries.store.galleries.get, name) if cached is None else cached

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


async def process_photos(
    backend: Backend, photos: list[bytes | str], stage: Callable[[bytes], Awaitable[Photo]]
) -> list[Photo | ImageError]:
    """Apply ``stage`` to every photo; a photo given as a URL is fetched first.

    An error of one of several photos is its result. An error of a single photo is raised.

    Raises InvalidRequestError: there is no photo.
    """
    if not photos:
        raise InvalidRequestError("send at least one photo in images or urls")

    async def process(photo: bytes | str) -> Photo:
        return await stage(photo if isinstance(photo, bytes) else await fetch_photo(backend, photo))

    if len(photos) == 1:
        return [await process(photos[0])]

    async def process_or_return_error(photo: bytes | str) -> Photo | ImageError:
        try:
            return await process(photo)
        except ImageError as error:
            return error

    return await gather_or_cancel([process_or_return_error(photo) for photo in photos])


async def fetch_photo(backend: Backend, url: str) -> bytes:
    """Fetch the photo at ``url`` if KITH_URL_HOSTS allows it.

    Raises as :meth:`service.inference.url_fetching.UrlFetcher.fetch`.
    """
    with backend.operations.metrics.stage("fetch"):
        return await backend.faces.fetcher.fetch(url)


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return all results in order. On the first error, cancel the others and raise it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

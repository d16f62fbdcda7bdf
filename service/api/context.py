"""What a request needs, built once by service.app and handed to every route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar, TypeVarTuple, cast

from fastapi import Depends, Request

from models.network import Network
from service.audit_writer import AuditWriter
from service.batching import Devices
from service.drift import Watches
from service.errors import GalleryMovedError
from service.fetching import Fetcher
from service.gallery.follower import Followers
from service.gallery.generations import Generations
from service.gallery.index import SharedEngine
from service.gallery.key_store import KeyStore
from service.gallery.store import Store
from service.gallery.subjects import Gallery
from service.jobs import Runner
from service.key_uses import KeyUses
from service.pipeline import Pipeline
from service.recognisers import Recognisers
from service.settings import Settings
from service.shadow import Shadow
from service.spool import Spool
from service.telemetry import Telemetry
from service.transfers import Transfers

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class Context:
    settings: Settings
    detection_network: Network
    recognisers: Recognisers
    store: Store
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
    keys: KeyStore
    key_uses: KeyUses
    shortfalls: Sequence[str]
    """Why networks do not run on the GPU that is wanted."""
    gpus: Devices | None
    """None: networks run on the CPU."""
    fetcher: Fetcher

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run something that blocks, away from the event loop."""
        return await self.pipeline.in_thread(function, *arguments)

    async def gallery(self, name: str) -> Gallery:
        """Raises GalleryNotFoundError."""
        known = self.store.gallery_at_once(name)
        return await self.run(self.store.gallery, name) if known is None else known

    async def change(
        self, name: str, function: Callable[[Gallery, *Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Run something with a gallery as it is; again where it moved to another recogniser meanwhile."""
        while True:
            try:
                return await self.run(function, await self.gallery(name), *arguments)
            except GalleryMovedError:
                continue


async def _context(request: Request) -> Context:  # async, or FastAPI would call it in a thread
    return cast(Context, request.app.state.context)


Kith = Annotated[Context, Depends(_context)]

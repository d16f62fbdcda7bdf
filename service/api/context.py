"""What a request needs, built once by service.app and handed to every route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar, TypeVarTuple, cast

from fastapi import Depends, Request

from models.pack import ModelPack
from models.recognition import Recogniser
from models.runtime import Network
from service.drift import Watches
from service.gallery.follower import Followers
from service.gallery.store import Store
from service.jobs import Runner
from service.pipeline import Pipeline
from service.settings import Settings
from service.spool import Spool
from service.telemetry import Telemetry

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class Context:
    settings: Settings
    pack: ModelPack
    detection_network: Network
    recognition_network: Network
    recogniser: Recogniser
    store: Store
    followers: Followers
    pipeline: Pipeline
    watches: Watches
    telemetry: Telemetry
    jobs: Runner
    spool: Spool

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run something that blocks, away from the event loop."""
        return await self.pipeline.in_thread(function, *arguments)


def _context(request: Request) -> Context:
    return cast(Context, request.app.state.context)


Kith = Annotated[Context, Depends(_context)]

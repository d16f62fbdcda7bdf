"""Jobs of a gallery that moves to another recogniser: kept crops are embedded anew, and what is no longer needed goes.

What is done is what has a vector: a job that was killed goes on with the templates that have none.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.alignment import align
from models.network import Float
from service import crops
from service.errors import GalleryMovedError, ImageDamagedError
from service.gallery.generations import DROP, FILL, Generations
from service.gallery.job_store import ItemOutcome, Job
from service.gallery.risks import GalleryRisks
from service.gallery.sealed_rows import open_crop
from service.gallery.store import Store
from service.gallery.subjects import Crop, Gallery
from service.jobs import JobContext, JobKind
from service.recognisers import Recognisers, Served

EMBEDDED_AT_ONCE: Final = 32
"""Templates of one transaction."""
DROPPED_AT_ONCE: Final = 5000


@dataclass(frozen=True)
class Migrations:
    """What the jobs need."""

    store: Store
    generations: Generations
    recognisers: Recognisers
    risks: GalleryRisks

    def kinds(self) -> dict[str, JobKind]:
        return {FILL: JobKind(self.fill, self.is_served), DROP: JobKind(self.drop)}

    def is_served(self, job: Job) -> bool:
        return self.recognisers.get(job.parameters["fingerprint"]) is not None

    async def fill(self, context: JobContext) -> None:
        """Give every template with a crop a vector of the job's generation; what is enrolled meanwhile too. Requests
        come first."""
        generation: int = context.job.parameters["generation"]
        view = await context.run(self._view, context)
        known = context.job.progress.done - context.job.progress.failed
        found = True
        while found and view is not None:
            keys, found = await context.run(self.generations.waiting_keys, view, generation), False
            await context.run(lambda total: context.record([], total=total), known + len(keys))
            for start in range(0, len(keys), EMBEDDED_AT_ONCE):
                context.check()
                view = await context.run(self._view, context)
                if view is None:
                    return
                embedded = await self._embed(context, view, keys[start : start + EMBEDDED_AT_ONCE])
                known, found = known + embedded, found or embedded > 0
        if view is not None:
            self.risks.follow(view)

    def _view(self, context: JobContext) -> Gallery | None:
        """The gallery as the job's generation sees it; None: it is of no use any more."""
        gallery = self.store.gallery(context.job.gallery)
        generation = context.job.parameters["generation"]
        other = gallery.other
        if generation != gallery.generation and (
            other is None or other.number != generation or other.state == "set_aside"
        ):
            return None
        return gallery.under(generation)

    async def _embed(self, context: JobContext, view: Gallery, keys: list[int]) -> int:
        """Tells how many of these templates could be embedded."""
        served = self.recognisers.of(view)
        cut, outcomes = await context.run(self._read, view, keys, served)
        faces = (served.batcher.submit([face], background=True) for _, face in cut.values())
        vectors: dict[int, Float] = {}
        for (pk, (name, _)), seen in zip(
            cut.items(), await asyncio.gather(*faces, return_exceptions=True), strict=True
        ):
            if isinstance(seen, ValueError):
                outcomes.append(_damaged(name, seen))
            elif isinstance(seen, BaseException):
                raise seen
            else:
                outcomes.append(ItemOutcome(name, "embedded"))
                (vectors[pk],) = seen
        await context.run(self._write, context, view, vectors, outcomes)
        return len(vectors)

    def _read(
        self, gallery: Gallery, keys: list[int], served: Served
    ) -> tuple[dict[int, tuple[str, NDArray[np.uint8]]], list[ItemOutcome]]:
        """Templates' ids and aligned faces by key, and what became of those that have none."""
        cut, damaged = {}, []
        for one in self.generations.waiting(gallery, keys):
            try:
                cut[one.pk] = one.id, aligned(open_crop(gallery.seal, one.sealed), served)
            except Exception as error:  # whatever it is, one crop does not keep the others from being embedded
                damaged.append(_damaged(one.id, error))
        return cut, damaged

    def _write(
        self, context: JobContext, view: Gallery, vectors: dict[int, Float], outcomes: list[ItemOutcome]
    ) -> None:
        # Cut over or rolled back meanwhile, it may still be wanted: the next pass finds what was not written.
        with suppress(GalleryMovedError):
            added = self.generations.add(view, view.generation, vectors, context.job, outcomes, context.seconds)
            context.asked(added)

    def drop(self, context: JobContext) -> None:
        """Delete the vectors of the job's generation."""
        generation = context.job.parameters["generation"]
        while keys := self.generations.embedded_keys(self.store.gallery(context.job.gallery), generation):
            for start in range(0, len(keys), DROPPED_AT_ONCE):
                context.check()
                with suppress(GalleryMovedError):  # these the next time round
                    gallery = self.store.gallery(context.job.gallery)
                    self.generations.drop(gallery, generation, keys[start : start + DROPPED_AT_ONCE])


def _damaged(template: str, error: Exception) -> ItemOutcome:
    return ItemOutcome(
        template, "image_damaged", ImageDamagedError(f"the kept crop cannot be read: {error}").document()
    )


def aligned(crop: Crop, served: Served) -> NDArray[np.uint8]:
    """The (size_px, size_px, 3) face as this recogniser wants it. Raises OSError, ValueError where it is damaged."""
    image, landmarks_xy = crops.read(crop)
    (face,) = align(image, landmarks_xy[None], served.recogniser.alignment)
    return np.asarray(face, np.uint8)

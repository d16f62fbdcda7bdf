"""Migration jobs: embed stored crops with another recognizer and switch to it, and delete vectors of old generations.

A killed job resumes with the templates that have no vector yet.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float
from models.vision.alignment import align
from service.core.errors import GalleryMovedError, ImageError
from service.domain.gallery import Crop, Gallery
from service.inference import crops
from service.inference.recognizers import Recognizers, ServedRecognizer
from service.jobs.runner import JobContext, JobKind
from service.risk.gallery_risks import GalleryRisks
from service.storage.db.row_sealing import open_crop
from service.storage.repositories.generations import DROP, FILL, GenerationStore, SealedCrops
from service.storage.repositories.jobs import ItemOutcome, Job
from service.storage.repositories.store import Store

EMBED_BATCH: Final = 32
"""Templates per transaction."""
REST_TIMEOUT_S: Final = 30.0
"""Time to embed the rest while the gallery is locked, which takes less than a second."""
Aligned = dict[int, tuple[str, NDArray[np.uint8]]]
"""Template id and aligned face by template key."""


@dataclass(frozen=True)
class Migrations:
    """Migration jobs and their dependencies."""

    store: Store
    generations: GenerationStore
    recognizers: Recognizers
    risks: GalleryRisks

    def kinds(self) -> dict[str, JobKind]:
        """Return the kinds of migration jobs by name."""
        return {FILL: JobKind(self.fill, self.is_served), DROP: JobKind(self.drop)}

    def is_served(self, job: Job) -> bool:
        """Return whether this process serves the job's recognizer."""
        return self.recognizers.get(job.parameters["fingerprint"]) is not None

    async def fill(self, context: JobContext) -> None:
        """Embed every template with a crop for the job's generation, and switch to it. Yields to requests."""
        damaged = set[int]()
        while (view := await context.run(self._view, context)) is not None:
            context.check()
            with suppress(GalleryMovedError):  # read the gallery again
                await self._fill(context, view, damaged)
                await context.run(self.risks.refresh, view.name, False, view.generation)
                if await context.run(self._switch, context, view, damaged, asyncio.get_running_loop()):
                    self.risks.derive_later(view)  # the rest may be a large part of a small gallery
                    return

    def _view(self, context: JobContext) -> Gallery | None:
        """Return the gallery under the job's generation; None: the generation was dropped."""
        with suppress(GalleryMovedError):
            return self.store.galleries.get(context.job.gallery).at_generation(context.job.parameters["generation"])
        return None

    async def _fill(self, context: JobContext, view: Gallery, damaged: set[int]) -> None:
        keys = await context.run(self._missing, context, view)
        for start in range(0, len(keys), EMBED_BATCH):
            context.check()
            batch = keys[start : start + EMBED_BATCH]
            sealed = await context.run(self.generations.crops, view, batch)
            cut, outcomes = await context.run(self._align, view, sealed)
            made = await self._embed(view, cut, outcomes, background=True)
            added = await context.run(self.generations.add, view, made, context.job, outcomes, context.seconds)
            context.note_cancellation(added)
            damaged.update(key for key in batch if key not in made)

    def _missing(self, context: JobContext, view: Gallery) -> list[int]:
        """Return the keys of templates to embed, and record their number."""
        missing, progress = self.generations.missing_keys(view), context.store.job(context.job.id).progress
        context.record([], progress.done - progress.failed + len(missing))
        return missing

    def _switch(self, context: JobContext, view: Gallery, damaged: set[int], loop: asyncio.AbstractEventLoop) -> bool:
        def embed(sealed: SealedCrops) -> tuple[dict[int, Float], list[ItemOutcome]]:
            cut, outcomes = self._align(view, sealed)
            made = asyncio.run_coroutine_threadsafe(self._embed(view, cut, outcomes), loop)
            return made.result(REST_TIMEOUT_S), outcomes

        return self.generations.switch(view, context.job, embed, damaged, context.seconds)

    def _align(self, view: Gallery, sealed: SealedCrops) -> tuple[Aligned, list[ItemOutcome]]:
        """Return aligned faces, and the outcomes of damaged crops."""
        served, cut, outcomes = self.recognizers.for_gallery(view), Aligned(), list[ItemOutcome]()
        for one in sealed:
            try:
                cut[one.pk] = one.id, aligned(open_crop(view.seal, one.sealed), served)
            except Exception as error:  # one damaged crop must not stop the job
                outcomes.append(_damaged(one.id, error))
        return cut, outcomes

    async def _embed(
        self, view: Gallery, cut: Aligned, outcomes: list[ItemOutcome], background: bool = False
    ) -> dict[int, Float]:
        """Return the vectors of the faces that can be embedded, and append the outcomes of all."""
        batcher, since = self.recognizers.for_gallery(view).batcher, time.monotonic()
        faces = (batcher.submit([face], background, since) for _, face in cut.values())
        made = dict[int, Float]()
        for (pk, (name, _)), seen in zip(
            cut.items(), await asyncio.gather(*faces, return_exceptions=True), strict=True
        ):
            if isinstance(seen, ValueError):
                outcomes.append(_damaged(name, seen))
            elif isinstance(seen, BaseException):
                raise seen
            else:
                outcomes.append(ItemOutcome(name, "embedded"))
                (made[pk],) = seen
        return made

    def drop(self, context: JobContext) -> None:
        """Delete the vectors of the job's generation."""
        gallery = self.store.galleries.get(context.job.gallery)
        self.generations.drop(gallery, context.job.parameters["generation"], context.check)


def _damaged(template: str, error: Exception) -> ItemOutcome:
    return ItemOutcome(
        template, "image_damaged", ImageError("image_damaged", f"the stored crop cannot be read: {error}").document()
    )


def aligned(crop: Crop, served: ServedRecognizer) -> NDArray[np.uint8]:
    """Return the (size_px, size_px, 3) face aligned for a recognizer. Raises OSError, ValueError for a damaged crop."""
    image, landmarks_xy = crops.decode_crop(crop)
    (face,) = align(image, landmarks_xy[None], served.recognizer.alignment)
    return np.asarray(face, np.uint8)

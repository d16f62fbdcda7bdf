"""Migration jobs: embed stored crops with another recognizer, and delete vectors of old generations.

A killed job resumes with the templates that have no vector yet.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.runtime.network import Float
from models.vision.alignment import align
from service.core.errors import GalleryMovedError
from service.core.photo_errors import ImageDamagedError
from service.domain.gallery import Crop, Gallery
from service.inference import crops
from service.inference.recognizers import Recognizers, ServedRecognizer
from service.jobs.runner import JobContext, JobKind
from service.risk.gallery_risks import GalleryRisks
from service.storage.db.row_sealing import open_crop
from service.storage.repositories.generations import DROP, FILL, GenerationStore
from service.storage.repositories.jobs import ItemOutcome, Job
from service.storage.repositories.store import Store

EMBED_BATCH: Final = 32
"""Templates per transaction."""
DROP_BATCH: Final = 5000


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
        """Embed every template with a crop for the job's generation, including new ones. Yields to requests."""
        generation: int = context.job.parameters["generation"]
        view = await context.run(self._view, context)
        known = context.job.progress.done - context.job.progress.failed
        found = True
        while found and view is not None:
            keys, found = await context.run(self.generations.missing_keys, view, generation), False
            await context.run(lambda total: context.record([], total=total), known + len(keys))
            for start in range(0, len(keys), EMBED_BATCH):
                context.check()
                view = await context.run(self._view, context)
                if view is None:
                    return
                embedded = await self._embed(context, view, keys[start : start + EMBED_BATCH])
                known, found = known + embedded, found or embedded > 0
        if view is not None:
            self.risks.derive_later(view)

    def _view(self, context: JobContext) -> Gallery | None:
        """Return the gallery under the job's generation; None: the generation is not needed any more."""
        gallery = self.store.galleries.get(context.job.gallery)
        generation = context.job.parameters["generation"]
        other = gallery.other
        if generation != gallery.generation and (
            other is None or other.number != generation or other.state == "set_aside"
        ):
            return None
        return gallery.at_generation(generation)

    async def _embed(self, context: JobContext, view: Gallery, keys: list[int]) -> int:
        """Embed these templates. Return how many succeeded."""
        served = self.recognizers.for_gallery(view)
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
        self, gallery: Gallery, keys: list[int], served: ServedRecognizer
    ) -> tuple[dict[int, tuple[str, NDArray[np.uint8]]], list[ItemOutcome]]:
        """Return template id and aligned face by key, and the outcomes of damaged crops."""
        cut, damaged = {}, []
        for one in self.generations.crops(gallery, keys):
            try:
                cut[one.pk] = one.id, aligned(open_crop(gallery.seal, one.sealed), served)
            except Exception as error:  # one damaged crop must not stop the job
                damaged.append(_damaged(one.id, error))
        return cut, damaged

    def _write(
        self, context: JobContext, view: Gallery, vectors: dict[int, Float], outcomes: list[ItemOutcome]
    ) -> None:
        # After a concurrent cut-over or rollback, the next pass finds the vectors that were not written.
        with suppress(GalleryMovedError):
            added = self.generations.add(view, view.generation, vectors, context.job, outcomes, context.seconds)
            context.note_cancellation(added)

    def drop(self, context: JobContext) -> None:
        """Delete the vectors of the job's generation."""
        generation = context.job.parameters["generation"]
        while keys := self.generations.embedded_keys(self.store.galleries.get(context.job.gallery), generation):
            for start in range(0, len(keys), DROP_BATCH):
                context.check()
                with suppress(GalleryMovedError):  # retried in the next round
                    gallery = self.store.galleries.get(context.job.gallery)
                    self.generations.delete_vectors(gallery, generation, keys[start : start + DROP_BATCH])


def _damaged(template: str, error: Exception) -> ItemOutcome:
    return ItemOutcome(
        template, "image_damaged", ImageDamagedError(f"the stored crop cannot be read: {error}").document()
    )


def aligned(crop: Crop, served: ServedRecognizer) -> NDArray[np.uint8]:
    """Return the (size_px, size_px, 3) face aligned for a recognizer. Raises OSError, ValueError for a damaged crop."""
    image, landmarks_xy = crops.decode_crop(crop)
    (face,) = align(image, landmarks_xy[None], served.recognizer.alignment)
    return np.asarray(face, np.uint8)

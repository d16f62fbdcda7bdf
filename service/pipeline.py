"""The request, readable on one screen: photo, faces, crops, vectors, decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from models import quality
from models.alignment import STANDARD, Alignment, align
from models.detection import Faces
from models.quality import Quality
from models.runtime import Float
from service.batching import Batcher
from service.decision import (
    Candidate,
    Decision,
    RiskTarget,
    Thresholds,
    decide,
    false_alarm_probability,
    thresholds_for,
)
from service.gallery.follower import Followers
from service.gallery.risks import GalleryRisks
from service.gallery.subjects import Gallery
from service.imaging import ImageLimits, decode

BACKGROUND_THREADS: Final = 2
Image = NDArray[np.uint8]
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, eq=False)
class Face:
    """One face of a photo; ``vector`` (d,) where it was asked for."""

    box_xyxy: Float
    landmarks_xy: Float
    score: float
    quality: Quality
    vector: Float | None = None


@dataclass(frozen=True, eq=False)
class Photo:
    """An upright photo's size in pixels and its faces, best score first."""

    width: int
    height: int
    faces: list[Face]

    def largest_row(self) -> int:
        """Row of the face with the largest box; call only where there is a face."""
        return int(np.argmax([np.prod(face.box_xyxy[2:] - face.box_xyxy[:2]) for face in self.faces]))

    def largest(self) -> Face:
        return self.faces[self.largest_row()]


@dataclass(frozen=True)
class Found:
    """The answer to one probe: the decision, the best subjects by key, and the thresholds that decided."""

    decision: Decision
    candidates: list[Candidate]
    thresholds: Thresholds


class Pipeline:
    """The stages in order. Each takes the previous one's value; none knows HTTP or settings."""

    def __init__(
        self,
        detector: Batcher[Image, Faces],
        recogniser: Batcher[Image, Float],
        alignment: Alignment,
        followers: Followers,
        risks: GalleryRisks,
        limits: ImageLimits,
        max_faces: int,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._detector = detector
        self._recogniser = recogniser
        self._alignment = alignment
        self._followers = followers
        self._limits = limits
        self._max_faces = max_faces
        self._threads = threads
        self._background = asyncio.Semaphore(BACKGROUND_THREADS)
        self.risks = risks

    async def detect(self, payload: bytes) -> Photo:
        """Decode a photo and find its faces. Raises ImageError."""
        photo, _ = await self._faces(payload)
        return photo

    async def embed(self, payload: bytes, largest_only: bool = False, background: bool = False) -> Photo:
        """Decode a photo, find its faces, and give each a vector; ``background``: behind the requests. Raises
        ImageError."""
        photo, crops = await self._faces(payload, background)
        if largest_only and photo.faces:
            row = photo.largest_row()
            photo, crops = replace(photo, faces=[photo.faces[row]]), crops[row : row + 1]
        vectors = await self._recogniser.submit(list(crops), background)
        return replace(photo, faces=[replace(face, vector=v) for face, v in zip(photo.faces, vectors, strict=True)])

    async def identify(
        self, gallery: Gallery, probes: Float, target: RiskTarget, k: int, among: set[int] | None = None
    ) -> list[Found]:
        """Search (q, d) unit vectors and decide each; subjects are named by their key. Raises RiskUncalibratedError."""
        return await self.in_thread(self._identify, gallery, probes, target, k, among)

    async def _faces(self, payload: bytes, background: bool = False) -> tuple[Photo, Image]:
        in_thread = self._aside if background else self.in_thread
        image = await in_thread(decode, payload, self._limits)
        (faces,) = await self._detector.submit([image], background)
        faces = faces[: self._max_faces]
        crops, qualities = await in_thread(_cut, image, faces, self._alignment)
        return Photo(image.shape[1], image.shape[0], _as_list(faces, qualities)), crops

    def _identify(
        self, gallery: Gallery, probes: Float, target: RiskTarget, k: int, among: set[int] | None
    ) -> list[Found]:
        # Two at least: the runner-up is needed to tell lookalikes.
        results, comparisons = self._followers.of(gallery).search(probes, max(2, k), among)
        known = self.risks.of(gallery)
        settings = gallery.settings
        thresholds = thresholds_for(target, known, comparisons, settings.review_factor)
        found = []
        for hits in results:
            candidates = [
                Candidate(
                    hit.subject_pk,
                    hit.similarity,
                    false_alarm_probability(hit.similarity, known, comparisons),
                )
                for hit in hits
            ]
            found.append(Found(decide(candidates, thresholds, settings.min_margin), candidates[:k], thresholds))
        return found

    async def _aside(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """In few of the threads, so that requests find one free."""
        async with self._background:
            return await self.in_thread(function, *arguments)

    async def in_thread(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _cut(image: Image, faces: Faces, alignment: Alignment) -> tuple[Image, list[Quality]]:
    # Quality is measured on the standard crop, so that its figures mean the same whatever the recogniser.
    crops = align(image, faces.landmarks_xy)
    qualities = [quality.measure(crop, points) for crop, points in zip(crops, faces.landmarks_xy, strict=True)]
    return crops if alignment == STANDARD else align(image, faces.landmarks_xy, alignment), qualities


def _as_list(faces: Faces, qualities: Sequence[Quality]) -> list[Face]:
    return [
        Face(box, points, float(score), measured)
        for box, points, score, measured in zip(
            faces.boxes_xyxy, faces.landmarks_xy, faces.scores, qualities, strict=True
        )
    ]
